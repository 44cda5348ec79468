"""The lease: one follower per policy, no number given twice, no effect on people.

The orphans here are real processes that are stopped with SIGSTOP and killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.errors import LeaseHeld, WeightsDamaged
from storage.weights.files import PolicyFiles
from storage.weights.lease import Lease, LeaseRecord, _put, current_lease, require_fence
from storage.weights.manifest import seal_document
from storage.weights.store import WeightFolder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the weights of a policy are, under a root."""
    found = tmp_path / "weights" / "default"
    found.mkdir(parents=True)
    return found


def files_in(directory: Path) -> PolicyFiles:
    return PolicyFiles(directory.parents[1], directory.name)


HOLDER = """
import sys
from storage.weights.files import PolicyFiles
from storage.weights.lease import Lease

lease = Lease.take(PolicyFiles(sys.argv[1], "default"), seconds=float(sys.argv[2]))
print(lease.fence, flush=True)
for line in sys.stdin:
    try:
        lease.renew()
        lease.check()
        print("held", flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


@contextlib.contextmanager
def holder(directory: Path, seconds: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """A process that has taken the lease; it answers a line with whether it still has it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory.parents[1]), str(seconds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline().strip().isdigit()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin
    assert process.stdout
    print(file=process.stdin, flush=True)
    return process.stdout.readline().strip()


def any_weights(*given: object) -> None:
    """The check of a store whose weights no policy acts with."""


def candidate(store: WeightFolder, value: float) -> str:
    return store.add_candidate(
        {"w": np.full(3, value, np.float32)}, spec={}, metrics={"value": value}, lineage={}
    )


def test_a_second_follower_is_barred_and_told_by_whom(directory: Path) -> None:
    """The error names process, host and number; once it is released the next one has it."""
    with (
        holder(directory) as first,
        pytest.raises(LeaseHeld, match=rf"process {first.pid} on \S+ \(lease 1, taken "),
    ):
        Lease.take(files_in(directory))
    with Taken(directory) as second:  # a dead process of this machine holds nothing
        assert second.fence == 2
    with Taken(directory) as third:
        assert third.fence == 3


class Taken:
    """A lease of this process, released at the end."""

    def __init__(self, directory: Path, **how: float) -> None:
        self.directory, self.how = directory, how

    def __enter__(self) -> Lease:
        self.lease = Lease.take(files_in(self.directory), **self.how)  # type: ignore[arg-type]
        return self.lease

    def __exit__(self, *error: object) -> None:
        self.lease.release()


def test_a_follower_may_wait_for_the_end_of_another(directory: Path) -> None:
    """A follower that waits, as with `--lease-wait`, takes over when the holder is killed."""
    with holder(directory) as first:
        got: list[Lease] = []
        waiting = threading.Thread(
            target=lambda: got.append(Lease.take(files_in(directory), wait=60.0))
        )
        waiting.start()
        first.kill()
        waiting.join(60.0)
    assert [lease.fence for lease in got] == [2]
    got[0].release()


def test_a_lease_is_renewed_while_its_holder_lives(directory: Path) -> None:
    """A lease is renewed beyond its first end: others see a record with a later end, and the
    holder's report."""
    with Taken(directory, seconds=0.5) as lease:
        lease.report({"version": 7})
        first = current_lease(files_in(directory))
        assert first
        pause = threading.Event()
        while (seen := current_lease(files_in(directory))) and seen.expires < first.expires + 1.0:
            pause.wait(0.01)
        assert seen
        assert seen.status == {"version": 7}
        assert seen.fence == lease.fence == 1


def test_an_orphan_that_wakes_up_after_its_lease_is_fenced_off(tmp_path: Path) -> None:
    """Another takes over from a holder stopped past its expiry, which may do nothing more."""
    store = WeightFolder(tmp_path, "default", check=any_weights)
    first, second, third = (candidate(store, value) for value in (1.0, 2.0, 3.0))
    with holder(store.directory, seconds=0.3) as orphan:
        orphan.send_signal(signal.SIGSTOP)
        lease = Lease.take(store.files, wait=60.0)
        live = store.publish(first, expected_generation=0, fence=lease.fence)
        orphan.send_signal(signal.SIGCONT)
        assert ask(orphan).startswith("LeaseHeld: default: lease 1 is over: process ")
    with pytest.raises(LeaseHeld, match="lease 1 is over"):
        store.publish(second, expected_generation=live.generation, fence=1)
    assert store.versions() == [1]  # not even a number
    with pytest.raises(LeaseHeld, match="lease 1 is over"):
        store.set_live(1, fence=1)
    assert store.live() == live
    lease.release()
    assert store.publish(third).version == 2  # people need no lease


def test_a_publication_expects_the_generation_that_its_publisher_saw(tmp_path: Path) -> None:
    store = WeightFolder(tmp_path, "default", check=any_weights)
    digests = [candidate(store, value) for value in (1.0, 2.0, 3.0)]
    seen = store.publish(digests[0], expected_generation=0)
    store.publish(digests[1])
    with pytest.raises(Exception, match="expected generation 1 to be live, got 2"):
        store.publish(digests[2], expected_generation=seen.generation)
    assert store.versions() == [1, 2]


def test_a_number_is_claimed_once_between_hosts(directory: Path) -> None:
    """Between hosts no file lock holds, but a lease's file name can be taken only once."""
    with Taken(directory) as lease:
        taken = current_lease(files_in(directory))
        assert taken
    elsewhere = replace(taken, fence=2, machine="elsewhere", expires=time.time() + 60)
    path = directory / "leases" / "2.json"
    path.write_bytes(elsewhere.to_bytes())
    with pytest.raises(LeaseHeld, match="lease 2 was taken meanwhile"):
        _put(files_in(directory), replace(taken, fence=2))  # by a host that saw number 1 alone
    assert LeaseRecord.read(files_in(directory), 2) == elsewhere
    with pytest.raises(LeaseHeld, match=r"process \d+ on .* trains this policy"):
        Lease.take(files_in(directory))
    with pytest.raises(LeaseHeld):
        require_fence(files_in(directory), lease.fence)


def test_a_process_of_another_machine_holds_until_its_record_expires(directory: Path) -> None:
    """Whether a holder on another host lives cannot be known here."""
    with Taken(directory):
        taken = current_lease(files_in(directory))
        assert taken
    path = directory / "leases" / "1.json"
    path.write_bytes(
        replace(taken, machine="elsewhere", pid=2**22, expires=time.time() + 60).to_bytes()
    )
    with pytest.raises(LeaseHeld, match=f"process {2**22}"):
        Lease.take(files_in(directory))
    path.write_bytes(replace(taken, machine="elsewhere", expires=time.time() - 1).to_bytes())
    with Taken(directory) as lease:
        assert lease.fence == 2


def test_a_dead_holder_whose_process_id_was_given_again_holds_nothing(directory: Path) -> None:
    """The process that has the id now started at another time, so it is not the holder."""
    with holder(directory, seconds=3600.0):
        killed = current_lease(files_in(directory))
        assert killed
    path = directory / "leases" / "1.json"
    path.write_bytes(replace(killed, pid=os.getpid()).to_bytes())
    with Taken(directory) as lease:
        assert lease.fence == 2


def test_a_damaged_record_bars_nobody_and_its_number_stays_given(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(directory):
        path = directory / "leases" / "1.json"
        path.write_text(json.dumps({"pid": 1}))
        with Taken(directory) as lease:
            assert lease.fence == 2
    assert "cannot be read is taken over" in caplog.text


def test_a_number_is_not_given_again_after_the_leases_were_lost(directory: Path) -> None:
    """`leases/` was deleted: the second has a higher number, and the first ends."""
    with Taken(directory) as first:
        shutil.rmtree(directory / "leases")
        with Taken(directory) as second:
            assert second.fence == 2
            with pytest.raises(LeaseHeld, match="lease 1 is over"):
                require_fence(files_in(directory), first.fence)
            first.renew()
            with pytest.raises(LeaseHeld, match="lease 1 is over"):
                first.check()
            second.renew()
            second.check()


def test_a_number_is_not_given_again_after_a_restore_of_the_weights(directory: Path) -> None:
    """The backup has the lease before: it is over, and the present one is remembered elsewhere."""
    Lease.take(files_in(directory)).release()
    backup = directory.parents[1] / "backup"
    shutil.copytree(directory, backup)
    with Taken(directory) as first:
        shutil.rmtree(directory)
        backup.rename(directory)
        with Taken(directory) as second:
            assert (first.fence, second.fence) == (2, 3)


def test_a_holder_puts_its_lost_record_back(directory: Path) -> None:
    """A holder writes its lost record again, so that the next trainer can name it in its error."""
    with Taken(directory) as first:
        shutil.rmtree(directory / "leases")
        first.renew()
        first.check()
        with pytest.raises(LeaseHeld, match=r"process \d+ on \S+ .lease 1, taken"):
            Lease.take(files_in(directory))


def test_a_holder_replaces_its_damaged_record(directory: Path) -> None:
    """Only another lease ends a lease, not damage to its file."""
    with Taken(directory) as first:
        (directory / "leases" / "1.json").write_bytes(b"{}")
        first.renew()
        first.check()
        with pytest.raises(LeaseHeld, match=r"process \d+ on \S+ .lease 1, taken"):
            Lease.take(files_in(directory))


def test_a_record_of_other_types_is_damaged(directory: Path) -> None:
    """Its digest is right, as of another build; nothing is compared with its values."""
    with Taken(directory):
        path = directory / "leases" / "1.json"
        body = json.loads(path.read_bytes())["body"]
        for name, value in (("expires", "later"), ("status", [1]), ("pid", None)):
            path.write_bytes(seal_document("lease", {**body, name: value}))
            with pytest.raises(WeightsDamaged, match=r"1\.json: expected a lease"):
                LeaseRecord.read(files_in(directory), 1)


def test_an_error_nobody_expected_ends_no_renewal(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A report that is no JSON cannot be written; the next one is."""
    pause = threading.Event()
    with Taken(directory, seconds=0.5) as lease:
        lease.report({"loss": float("nan")})
        while "cannot be renewed" not in caplog.text:
            pause.wait(0.01)
        lease.report({"version": 7})
        while (seen := current_lease(files_in(directory))) and seen.status != {"version": 7}:
            pause.wait(0.01)
        lease.check()


def test_of_two_leases_with_one_number_one_ends(directory: Path) -> None:
    """The whole root was restored, with the memory of numbers: the record on disk tells."""
    with Taken(directory) as first:
        shutil.rmtree(directory / "leases")
        shutil.rmtree(directory.parents[1] / "numbers")
        with Taken(directory) as second:
            assert second.fence == first.fence == 1
            for lease in (first, second):
                lease.renew()
            second.check()
            with pytest.raises(LeaseHeld, match=r"process \d+ .* has the same number"):
                first.check()


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64])
def test_a_damaged_memory_of_numbers_bars_nobody(
    directory: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """The numbers in `leases/` still count, and the damage is logged."""
    Lease.take(files_in(directory)).release()
    (directory.parents[1] / "numbers" / "default.lease").write_bytes(content)
    with Taken(directory) as lease:
        assert lease.fence == 2
    assert "a restore may go unnoticed" in caplog.text


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_keeps_no_follower_waiting(
    directory: Path, make: Callable[[Path], None]
) -> None:
    """A FIFO or a folder as `leases/7.json` is damage, and does not block; its number stays
    taken."""
    (directory / "leases").mkdir()
    make(directory / "leases" / "7.json")
    with pytest.raises(WeightsDamaged, match="expected a regular file"):
        current_lease(files_in(directory))
    with pytest.raises(LeaseHeld, match="lease 7 was taken"):
        require_fence(files_in(directory), 6)
    with Taken(directory) as lease:
        assert lease.fence == 8


@pytest.mark.parametrize(
    "name", ["\u00b2.json", "01.json", "-1.json", "0.json", "1.json.tmp", "x.json"]
)
def test_other_names_are_no_leases(directory: Path, name: str) -> None:
    (directory / "leases").mkdir()
    (directory / "leases" / name).write_text("x")
    with Taken(directory) as lease:
        assert lease.fence == 1
