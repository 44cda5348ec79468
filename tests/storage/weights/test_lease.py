"""Laws of the lease: one follower of a policy, no number given twice, no bar to people.

The orphans here are real processes that are stopped with SIGSTOP and killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.errors import LeaseHeld
from storage.weights.lease import Lease, LeaseRecord, _link, current_lease, require_fence
from storage.weights.store import WeightStore

HOLDER = """
import sys
from pathlib import Path
from storage.weights.lease import Lease

lease = Lease.take(Path(sys.argv[1]), seconds=float(sys.argv[2]))
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
        [sys.executable, "-c", HOLDER, str(directory), str(seconds)],
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


def candidate(store: WeightStore, value: float) -> str:
    return store.add_candidate(
        {"w": np.full(3, value, np.float32)}, spec={}, metrics={"value": value}, lineage={}
    )


def test_a_second_follower_is_barred_and_told_by_whom(tmp_path: Path) -> None:
    """The error names process, host and number; once it is released the next one has it."""
    with (
        holder(tmp_path) as first,
        pytest.raises(LeaseHeld, match=rf"process {first.pid} on \S+ \(lease 1, taken "),
    ):
        Lease.take(tmp_path)
    with Taken(tmp_path) as second:  # a process of this machine that is dead holds nothing
        assert second.fence == 2
    with Taken(tmp_path) as third:
        assert third.fence == 3


class Taken:
    """A lease of this process, released at the end."""

    def __init__(self, directory: Path, **how: float) -> None:
        self.directory, self.how = directory, how

    def __enter__(self) -> Lease:
        self.lease = Lease.take(self.directory, **self.how)  # type: ignore[arg-type]
        return self.lease

    def __exit__(self, *error: object) -> None:
        self.lease.release()


def test_a_follower_may_wait_for_the_end_of_another(tmp_path: Path) -> None:
    """As `--lease-wait` does: it takes over when the holder is killed."""
    with holder(tmp_path) as first:
        got: list[Lease] = []
        waiting = threading.Thread(target=lambda: got.append(Lease.take(tmp_path, wait=60.0)))
        waiting.start()
        first.kill()
        waiting.join(60.0)
    assert [lease.fence for lease in got] == [2]
    got[0].release()


def test_a_lease_is_renewed_while_its_holder_lives(tmp_path: Path) -> None:
    """Longer than it lasts without: the record that others see moves on, with the report."""
    with Taken(tmp_path, seconds=0.5) as lease:
        lease.report({"version": 7})
        first = current_lease(tmp_path)
        assert first
        pause = threading.Event()
        while (seen := current_lease(tmp_path)) and seen.expires < first.expires + 1.0:
            pause.wait(0.01)
        assert seen
        assert seen.status == {"version": 7}
        assert seen.fence == lease.fence == 1


def test_an_orphan_that_wakes_up_after_its_lease_is_fenced_off(tmp_path: Path) -> None:
    """Stopped past its end, another takes over: neither renewal nor publication comes through."""
    store = WeightStore(tmp_path, "default", check=any_weights)
    first, second, third = (candidate(store, value) for value in (1.0, 2.0, 3.0))
    with holder(store.directory, seconds=0.3) as orphan:
        orphan.send_signal(signal.SIGSTOP)
        lease = Lease.take(store.directory, wait=60.0)
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
    store = WeightStore(tmp_path, "default", check=any_weights)
    digests = [candidate(store, value) for value in (1.0, 2.0, 3.0)]
    seen = store.publish(digests[0], expected_generation=0)
    store.publish(digests[1])
    with pytest.raises(Exception, match="expected generation 1 to be live, got 2"):
        store.publish(digests[2], expected_generation=seen.generation)
    assert store.versions() == [1, 2]


def test_a_number_is_claimed_once_between_hosts(tmp_path: Path) -> None:
    """No file lock holds between them: a name that is taken does."""
    with Taken(tmp_path) as lease:
        taken = current_lease(tmp_path)
        assert taken
    elsewhere = replace(taken, fence=2, machine="elsewhere", expires=time.time() + 60)
    path = tmp_path / "leases" / "2.json"
    path.write_bytes(elsewhere.to_bytes())
    with pytest.raises(LeaseHeld, match="lease 2 was taken meanwhile"):
        _link(tmp_path, replace(taken, fence=2))  # by a host that saw number 1 alone
    assert LeaseRecord.read(path) == elsewhere
    with pytest.raises(LeaseHeld, match=r"process \d+ on .* trains this policy"):
        Lease.take(tmp_path)
    with pytest.raises(LeaseHeld):
        require_fence(tmp_path, lease.fence)


def test_a_process_of_another_machine_holds_until_its_record_expires(tmp_path: Path) -> None:
    """Whether it lives nobody here can tell."""
    with Taken(tmp_path):
        taken = current_lease(tmp_path)
        assert taken
    path = tmp_path / "leases" / "1.json"
    path.write_bytes(
        replace(taken, machine="elsewhere", pid=2**22, expires=time.time() + 60).to_bytes()
    )
    with pytest.raises(LeaseHeld, match=f"process {2**22}"):
        Lease.take(tmp_path)
    path.write_bytes(replace(taken, machine="elsewhere", expires=time.time() - 1).to_bytes())
    with Taken(tmp_path) as lease:
        assert lease.fence == 2


def test_a_damaged_record_bars_nobody_and_its_number_stays_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path):
        path = tmp_path / "leases" / "1.json"
        path.write_text(json.dumps({"pid": 1}))
        with Taken(tmp_path) as lease:
            assert lease.fence == 2
    assert "cannot be read is taken over" in caplog.text
