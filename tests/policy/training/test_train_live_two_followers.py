"""Two trainers on one root: a scheduler's retry, and the orphan of its first attempt.

The orphan is a real follower, stopped with SIGSTOP before its publication, which continues after
its lease has expired and another trainer has taken over.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.inference.weight_store import WeightStore
from policy.training.settings import FollowSettings
from policy.training.train_live import follow
from storage.errors import LeaseHeld
from storage.weights.files import PolicyFiles
from storage.weights.lease import Lease
from tests.policy.training.live_log import CONFIG, SPEC, Followers, declare, part, run, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    declare(tmp_path)
    for first in range(0, 100, 10):
        write(tmp_path, *(part(first + i) for i in range(10)))
    return tmp_path


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    found = Followers()
    yield found
    found.close()


def until_stopped(pid: int) -> None:
    pause = threading.Event()
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pause.wait(0.01)


def rows_by_version(root: Path) -> list[int]:
    store = WeightStore(root, "default")
    return [int(store.manifest(n).metrics["rows_trained"]) for n in store.versions()]


def wrong(root: Path, status: int) -> set[str]:
    """The traces of a second publisher: decreasing rows, or an orphan's publication."""
    rows = rows_by_version(root)
    found = set()
    if rows != sorted(set(rows)):
        found.add("rows_went_back")
    live = WeightStore(root, "default").live()
    if live is None or rows[live.version - 1] != max(rows):
        found.add("live_is_old")
    if status == 0:
        found.add("orphan_went_on")
    return found


def scene(root: Path, followers: Followers, place: str, planted: str = "") -> int:
    """The exit status of an orphan: stopped in its second update, woken after the retry's three."""
    job = {"kill": [2, place], "signal": signal.SIGSTOP, "lease_seconds": 0.5, "planted": planted}
    orphan = followers.start(root, updates=3, **job)
    try:
        until_stopped(orphan)
        assert followers.run(root, updates=3, lease_wait=60.0, planted=planted) == 0
    finally:
        os.kill(orphan, signal.SIGCONT)
    return followers.wait(orphan)


@pytest.mark.parametrize("place", ["learned", "checkpoint"])
def test_an_orphan_that_wakes_up_publishes_nothing(
    root: Path, followers: Followers, place: str
) -> None:
    """Stopped after its update or its checkpoint, it harms neither versions nor checkpoints.

    The next start continues from the retry's.
    """
    status = scene(root, followers, place)
    assert wrong(root, status) == set()
    before = rows_by_version(root)
    result, _ = run(root, 1)
    assert result.conflicts == 0
    assert rows_by_version(root) == [*before, before[-1] + 100]


@pytest.mark.long
def test_a_lease_without_fencing_is_caught(root: Path, followers: Followers) -> None:
    """In the planted build, the orphan continues next to its successor."""
    assert wrong(root, scene(root, followers, "learned", planted="no_fencing"))


def test_a_second_follower_is_told_who_trains(root: Path) -> None:
    """The error names the process, also to a follower that would publish nothing."""
    lease = Lease.take(PolicyFiles(root, "default"))
    try:
        with pytest.raises(LeaseHeld, match=f"process {os.getpid()} on "):
            follow(
                root,
                "default",
                CONFIG,
                settings=FollowSettings(publish=False),
                spec=SPEC,
                stop=lambda: True,
            )
    finally:
        lease.release()
    assert run(root, 1)[0].version == 2


@pytest.mark.parametrize("on_conflict", ["reload", "end"])
def test_a_lost_race_reloads_or_ends(
    root: Path, on_conflict: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody publishes version 1's weights by hand between two updates."""
    store = WeightStore(root, "default")
    seen: list[dict[str, float]] = []
    asked = iter(range(300))

    def on_update(metrics: dict[str, float]) -> None:
        seen.append(metrics)
        if len(seen) == 2:
            manifest, weights = store.load(1)
            theirs = store.add_candidate(
                weights, spec=manifest.spec, metrics={"by": "hand"}, lineage={}
            )
            assert store.publish(theirs).version == 4

    result = follow(
        root,
        "default",
        CONFIG,
        FollowSettings(steps_per_update=100, on_conflict=on_conflict),  # type: ignore[arg-type]
        spec=SPEC,
        on_update=on_update,
        stop=lambda: len(seen) >= 5 or next(asked, None) is None,
    )
    assert "version 4 was made live by another process" in caplog.text
    if on_conflict == "end":
        assert (result.ended, result.conflicts, store.versions()) == ("conflict", 1, [1, 2, 3, 4])
        return
    assert (result.ended, result.conflicts) == ("stopped", 1)
    assert [one["version"] for one in seen] == [2, 3, 4, 5, 6]
    assert result.excluded == {"superseded": 300}
    assert (result.rows_read, result.rows_trained) == (500, 200)
    assert store.manifest(5).parent == 4
    assert store.manifest(6).metrics["rows_trained"] == 200


def test_a_file_system_that_refuses_is_waited_for(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that cannot be written is logged and retried; each version has one."""
    folder = root / "weights" / "default" / "checkpoints"
    aside = root / "aside"
    seen: list[dict[str, float]] = []
    refused = iter(range(12))

    def on_update(metrics: dict[str, float]) -> None:
        seen.append(metrics)
        if len(seen) == 1:
            folder.rename(aside)
            folder.write_text("in the way")

    def stop() -> bool:
        if folder.is_file() and next(refused, None) is None:
            folder.unlink()
            aside.rename(folder)
        return len(seen) >= 3

    result = follow(
        root,
        "default",
        CONFIG,
        settings=FollowSettings(steps_per_update=100),
        spec=SPEC,
        on_update=on_update,
        stop=stop,
    )
    assert (result.version, result.rows_trained) == (4, 300)
    assert "writing the checkpoint: " in caplog.text
    assert re.search(r"trying again in 0\.[2-5] s", caplog.text)
    assert "writing the checkpoint: succeeded" in caplog.text
