"""A follower's state: kills neither repeat nor lose rows, and the lineage is exact by row.

The kills are SIGKILL between any two writes. The same checks have to catch the planted broken
builds.

Also of `storage.reading.untrained_rows`.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.inference.weight_store import WeightStore
from policy.training.checkpoint_files import CheckpointFiles
from policy.training.settings import FollowSettings
from policy.training.train_live import FollowResult, follow
from storage.errors import PolicyPinned
from storage.weights.files import PolicyFiles
from storage.weights.off_chain import off_chain
from tests.policy.training.live_log import (
    CONFIG,
    SPEC,
    STREAM,
    Followers,
    claimed,
    declare,
    history,
    part,
    rows_of,
    run,
    write,
)

KILLED = -signal.SIGKILL
PLACES = ("learned", "candidate", "checkpoint", "promoted", "published")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return declare(tmp_path)


def fill(root: Path, parts: int = 33, steps: int = 37) -> None:
    """Parts of 37 rows: updates of 100 end inside of them."""
    listed = [part(i, steps=steps, final_obs=None) for i in range(parts)]
    for first in range(0, parts, 4):
        write(root, *listed[first : first + 4])


def account(root: Path) -> dict[str, object]:
    """The differences between the rows trained on and the live version's lineage."""
    live = WeightStore(root, "default").live()
    assert live
    trained, says = Counter(history(root)), claimed(root, live.version)
    wrong: dict[str, object] = {}
    if doubled := [row for row, count in trained.items() if count > 1]:
        wrong["doubled"] = doubled[:5]
    if trained.keys() - says:
        wrong["not_claimed"] = sorted(trained.keys() - says)[:5]
    if says - trained.keys():
        wrong["not_trained"] = sorted(says - trained.keys())[:5]
    versions = WeightStore(root, "default").versions()
    if off := [v for v in versions if off_chain(PolicyFiles(root, "default"), v)]:
        wrong["chain"] = off  # no checkpoint was damaged here
    first = sorted(rows_of(root, range(1000)))[: len(trained)]
    if sorted(trained) != first:  # the order of the shards, without a gap
        wrong["lost"] = sorted(set(first) - trained.keys())[:5]
    return wrong


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    found = Followers()
    yield found
    found.close()


def test_a_kill_between_any_two_writes_loses_and_doubles_no_row(
    root: Path, followers: Followers
) -> None:
    """After kills at every place, each row is trained on once, and the lineage says so."""
    fill(root)
    for place in PLACES:
        assert followers.run(root, kill=[1, place], updates=100) == KILLED, place
    assert followers.run(root, updates=3) == 0
    assert account(root) == {}
    store = WeightStore(root, "default")
    live = store.live()
    assert live
    trained = store.manifest(live.version).metrics["rows_trained"]
    assert len(claimed(root, live.version)) == trained >= 600


def test_what_a_kill_kept_from_going_live_is_published_at_the_start(
    root: Path, followers: Followers
) -> None:
    """Otherwise clients held by the previous version would wait for it forever."""
    fill(root, parts=3)  # one update and a little
    assert followers.run(root, kill=[1, "checkpoint"], updates=100) == KILLED
    store = WeightStore(root, "default")
    assert (live := store.live())
    assert live.version == 1
    result, reports = run(root, 0)
    assert (result.version, result.updates, reports) == (2, 1, [])
    assert len(claimed(root, 2)) == 100


@pytest.mark.long
@pytest.mark.parametrize(
    ("planted", "place", "symptoms"),
    [
        ("stale_position", "published", {"doubled"}),
        ("published_first", "live", {"not_claimed", "lost", "doubled", "chain"}),
        ("claims_rows_in_the_reader", "published", {"not_trained"}),
    ],
)
def test_a_broken_follower_is_caught_by_the_account(
    root: Path, followers: Followers, planted: str, place: str, symptoms: set[str]
) -> None:
    """`account` reports the symptoms of each planted fault."""
    fill(root)
    for update in (2, 1):
        job = {"kill": [update, place], "updates": 100, "planted": planted}
        assert followers.run(root, **job) == KILLED
    assert followers.run(root, updates=3, planted=planted) == 0
    assert symptoms & account(root).keys()


def checkpoints(root: Path) -> list[Path]:
    """The latest first."""
    return CheckpointFiles(root / "weights" / "default" / "checkpoints", 0).found()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its version is off the chain, and the rows of its update are trained on again."""
    write(root, *(part(i) for i in range(40)))
    run(root, 3)
    latest, _ = checkpoints(root)
    flip(latest, -5)
    result, _ = run(root, 1)
    store = WeightStore(root, "default")
    assert latest.with_name(f"{latest.name}.damaged-1").exists()
    assert "set aside" in caplog.text
    assert "version 4 is off the chain" in caplog.text
    assert (off_chain(store.files, 4) or "").startswith("its checkpoint is lost")
    assert off_chain(store.files, 3) is None
    assert (result.version, result.rows_trained) == (5, 300)
    assert claimed(root, 5) == claimed(root, 4) == rows_of(root, range(30))
    assert store.manifest(5).metrics["update"] == 3


def test_any_flipped_bit_in_a_checkpoint_is_found(root: Path) -> None:
    """In the header or in a tensor, the bit costs one update: the checkpoint before is used."""
    write(root, *(part(i) for i in range(40)))
    run(root, 2)
    saved = {path: path.read_bytes() for path in checkpoints(root)}
    latest = checkpoints(root)[0]
    size = len(saved[latest])
    header = int.from_bytes(saved[latest][:8], "little")
    rng = np.random.default_rng(3)
    for at in [0, 9, header, *rng.integers(0, 8 + header, 12), *rng.integers(header, size, 4)]:
        for path, data in saved.items():
            path.write_bytes(data)
        flip(latest, int(at))
        result, _ = run(root, 0)
        aside = latest.with_name(f"{latest.name}.damaged-1")
        assert aside.exists(), at
        assert result.updates == 1
        aside.unlink()


def test_with_no_checkpoint_left_the_live_weights_are_taken_row_by_row(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues from the live version at its exact row, within a part."""
    fill(root, parts=12)
    run(root, 2)
    for path in checkpoints(root):
        flip(path, 20)
    result, _ = run(root, 1)
    assert "continuing from version 3" in caplog.text
    store = WeightStore(root, "default")
    rows = sorted(rows_of(root, range(12)))
    assert (result.version, sorted(claimed(root, 4))) == (4, rows[:300])
    assert sorted(claimed(root, 3)) == rows[:200]
    assert off_chain(store.files, 3) is None  # version 4 continued from it


def test_rows_that_are_left_out_are_in_no_lineage(root: Path) -> None:
    """The lineage has the part of an abandoned episode without its last row."""
    write(root, *(part(i, ended="abandoned") for i in range(10)))
    result, _ = run(root, 1)
    assert result.excluded == {"no_next_obs": 10}
    assert claimed(root, 2) == {(i, t) for i in range(10) for t in range(9)}
    assert WeightStore(root, "default").untrained(2) == {STREAM: [[i, 9, 1] for i in range(10)]}


def test_rows_of_a_position_that_no_shard_has_any_more_are_claimed_by_nobody(root: Path) -> None:
    """If a shard disappears, its untrained rows count as `vanished`, and are in no lineage."""
    path = write(root, *(part(i, steps=40) for i in range(5)))
    run(root, 1)
    half = {(2, t) for t in range(20)}
    assert claimed(root, 2) == rows_of(root, [0, 1]) | half
    path.rename(root / "gone")
    write(root, *(part(5 + i) for i in range(10)))
    result, _ = run(root, 1)
    assert result.excluded == {"vanished": 100}  # what the reader held of them, once
    (root / "gone").rename(path)
    assert claimed(root, 3) - rows_of(root, range(5, 15)) == rows_of(root, [0, 1]) | half


def test_a_rollback_under_a_follower_is_followed_and_holds(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It continues from the live version, keeps candidates, and publishes after `resume`."""
    write(root, *(part(i) for i in range(50)))
    store = WeightStore(root, "default")
    seen: list[Any] = []

    def on_update(metrics: dict[str, float]) -> None:
        seen.append(metrics)
        if len(seen) == 2:
            store.rollback(2, by="somebody", why="a test")
        elif len(seen) == 4:
            with pytest.raises(PolicyPinned):
                store.publish(store.candidates()[0])
            store.resume()

    result = follow_for(root, 5, on_update, seen)
    assert [one["version"] for one in seen] == [2, 3, 4, 4, 5]
    assert store.manifest(4).copy_of == 2
    assert (result.conflicts, result.version) == (1, 5)
    assert "version 4 was made live by another process" in caplog.text
    assert result.excluded == {"superseded": 200}
    # the two updates since then descend from version 2, whose 100 rows they have behind them
    assert (result.rows_trained, result.rows_read) == (300, 500)
    ours = rows_of(root, [*range(10), *range(30, 50)])
    assert claimed(root, 5) == ours
    assert store.manifest(5).metrics["rows_trained"] == 300


def test_rows_of_a_part_that_were_trained_into_lost_weights_are_not_claimed(root: Path) -> None:
    """Another process publishes while an update ends inside a part.

    The part's first rows are in the weights that lost, and its other rows in the next lineage.
    """
    fill(root, parts=12)
    store = WeightStore(root, "default")
    seen: list[Any] = []

    def on_update(metrics: dict[str, float]) -> None:
        seen.append(metrics)
        if len(seen) == 1:
            manifest, weights = store.load(1)
            theirs = {"spec": manifest.spec, "metrics": {"by": "hand"}, "lineage": {}}
            store.publish(store.add_candidate(weights, **theirs))

    follow_for(root, 3, on_update, seen)
    assert [one["version"] for one in seen] == [2, 3, 4]
    assert sorted(claimed(root, 4)) == sorted(rows_of(root, range(12)))[200:300]


def follow_for(
    root: Path, updates: int, on_update: Callable[[dict[str, float]], None], seen: list[Any]
) -> FollowResult:
    asked = iter(range(300))
    return follow(
        root,
        "default",
        CONFIG,
        settings=FollowSettings(steps_per_update=100, checkpoint_every=1),
        spec=SPEC,
        stop=lambda: len(seen) >= updates or next(asked, None) is None,
        on_update=on_update,
    )
