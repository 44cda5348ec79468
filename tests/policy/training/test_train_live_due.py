"""When an update is due: with all its steps, or when clients wait and no more can be read."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from policy.inference.weight_store import WeightStore
from policy.training import train_live
from policy.training.settings import FollowSettings
from policy.training.train_live import follow
from storage.declarations.held_policies import held_version, say_held
from storage.experience.episode import Part
from storage.weights.manifest import Served
from tests.policy.training.live_log import CONFIG, SPEC, claimed, declare, part, rows_of, run, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return declare(tmp_path)


def damaged(root: Path, *parts: Part) -> None:
    """Write a shard that is damaged before it has its name."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        path = write(Path(folder), *parts)
        damage(path)
        place = root / "shards" / path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        path.rename(place / path.name)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[16] ^= 1
    path.write_bytes(bytes(data))


def test_with_a_damaged_shard_a_held_version_is_followed_by_the_next(root: Path) -> None:
    """The 40 readable steps of 100 make an update, and the others count as `damaged`."""
    write(root, *(part(i) for i in range(4)))
    path = write(root, *(part(4 + i) for i in range(6)))
    damage(path)
    say_held(root, "default", 1)
    result, reports = run(root, 1)
    assert (result.version, result.rows_trained) == (2, 40)
    assert result.excluded == {"damaged": 60}
    assert list(result.excluded_shards) == [str(path)]
    assert [one["rows"] for one in reports] == [40]
    damage(path)  # the same byte: it is whole again
    assert claimed(root, 2) == rows_of(root, range(4))


def test_an_update_may_be_due_without_a_row(root: Path) -> None:
    """If all rows are damaged, clients still get a version, with the usual metrics."""
    write(root, *(part(i) for i in range(10)))
    _, reports = run(root, 1)
    damage(write(root, *(part(10 + i, version=2) for i in range(10))))
    say_held(root, "default", 2)
    result, more = run(root, 1)
    assert (result.version, result.rows_trained) == (3, 100)
    assert more[0].keys() == reports[0].keys()
    assert more[0]["rows"] == 0


@pytest.mark.parametrize("held", [None, 0], ids=["not-held", "an-earlier-version"])
def test_a_version_that_nobody_waits_for_is_not_followed_early(
    root: Path, held: int | None
) -> None:
    """Slow clients cause no small updates, and neither does a report of an earlier version."""
    write(root, *(part(i) for i in range(4)))
    if held is not None:
        say_held(root, "default", held)
    result, reports = run(root, 1, stop_after=30)
    assert (result.version, reports) == (1, [])


def test_a_version_of_somebody_else_that_is_held_is_followed(root: Path) -> None:
    """If clients wait at a version that a person published, the follower publishes the next."""
    write(root, *(part(i) for i in range(10)))
    store, reports = WeightStore(root, "default"), list[dict[str, float]]()
    asked = iter(range(60))

    def stop() -> bool:
        if len(reports) == 1 and (live := store.live()) is not None and live.version == 2:
            manifest, weights = store.load(1)
            theirs = {"spec": manifest.spec, "metrics": {"by": "hand"}, "lineage": {}}
            store.publish(store.add_candidate(weights, **theirs))
            damaged(root, *(part(10 + i, version=3) for i in range(10)))
            say_held(root, "default", 3)
        return len(reports) >= 3 or next(asked, None) is None

    result = follow(
        root,
        "default",
        CONFIG,
        settings=FollowSettings(steps_per_update=100),
        spec=SPEC,
        stop=stop,
        on_update=reports.append,
    )
    assert [one["version"] for one in reports] == [2, 3, 4]
    assert (result.version, result.conflicts) == (4, 1)


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers-known", "numbers-lost"])
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "started-later"])
def test_weights_of_a_backup_are_followed_by_the_next_version(
    root: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool, numbers: bool
) -> None:
    """Clients wait at version 4 while the weights are restored as of version 2: 5 follows.

    The collector accepts nothing older. If the used numbers are known, the next version is 5;
    otherwise versions follow quickly until 5.
    """
    if not numbers:
        monkeypatch.setattr(train_live, "_REFUSED_SECONDS", 0.0)
    write(root, *(part(i) for i in range(30)))
    store = WeightStore(root, "default")
    copy, asked, restored = root / "copy", iter(range(100)), False

    def restore() -> None:
        nonlocal restored
        restored = True
        say_held(root, "default", 4)
        shutil.rmtree(root / "weights")
        copy.rename(root / "weights")
        if stopped:  # as of a backup that is older than its lease is long
            shutil.rmtree(store.directory / "leases")
        if not numbers:
            shutil.rmtree(root / "numbers")

    def stop() -> bool:
        """Asked between any two updates: copy version 2, put that back when 4 is live."""
        live = store.live()
        version = 0 if live is None else live.version
        if version == 2 and not copy.exists() and not restored:
            shutil.copytree(root / "weights", copy)
        if version == 4 and not restored:
            if stopped:
                return True
            restore()
        return version > 4 or next(asked, None) is None

    def on() -> None:
        follow(
            root,
            "default",
            CONFIG,
            settings=FollowSettings(steps_per_update=100),
            spec=SPEC,
            stop=stop,
        )

    if stopped:
        on()
        restore()
    on()
    live = store.live()
    assert live is not None
    assert live.version == 5
    if numbers:
        assert live.generation == 5
        assert claimed(root, 5) == claimed(root, 2)


def test_a_version_that_its_collector_refuses_is_followed_by_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise clients would wait at the version before it forever."""
    write(root, *(part(i) for i in range(10)))
    run(root, 1)
    store = WeightStore(root, "default")
    say_held(root, "default", 1)
    refusing = Served(
        collector_id="a", generation=1, version=1, wanted_generation=2, wanted_version=2,
        why="it is damaged", until=int((time.time() + 60) * 1_000_000), served=[[1, 1]], refused={},
    )  # fmt: skip
    store.served.write(dataclasses.replace(refusing, why=None))
    monkeypatch.setattr(train_live, "_REFUSED_SECONDS", 0.0)
    assert run(root, 1, stop_after=30)[0].version == 2
    store.served.write(refusing)
    assert run(root, 1, stop_after=30)[0].version == 3


def test_who_does_not_publish_makes_no_empty_updates(root: Path) -> None:
    """Held clients cause one update with the rows there are, and no more until somebody publishes.

    The lag counts from the live version.
    """
    write(root, *(part(i) for i in range(14)))
    run(root, 1, stop_after=60)
    store = WeightStore(root, "default")
    published = set(store.candidates())
    say_held(root, "default", 2)
    _, reports = run(root, 9, stop_after=30, publish=False)
    assert [one["rows"] for one in reports] == [40]
    say_held(root, "default", None)
    (kept,) = set(store.candidates()) - published
    assert store.publish(kept).version == 3
    write(root, *(part(14 + i, version=3) for i in range(20)))
    _, reports = run(root, 2, stop_after=30, publish=False)
    assert reports[-1]["policy_lag_mean"] == 0


def test_where_nobody_says_what_is_held_a_pause_after_a_damaged_shard_will_do(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that cannot write `flow/` reports nothing: 40 of 100 steps make an update.

    The same damage causes no second update, not even after a restart.
    """
    monkeypatch.setattr(train_live, "_QUIET_SECONDS", 0.0)
    write(root, *(part(i) for i in range(4)))
    damaged(root, *(part(4 + i) for i in range(6)))
    result, reports = run(root, 9, stop_after=30)
    assert (result.version, [one["rows"] for one in reports]) == (2, [40])
    _, reports = run(root, 9, stop_after=30)
    assert reports == []


def test_what_is_said_can_be_taken_back(root: Path) -> None:
    """A held version is reported and withdrawn; a damaged report counts as none."""
    assert held_version(root, "default") is None
    say_held(root, "default", None)
    assert not (root / "flow").exists()
    say_held(root, "default", 7)
    assert held_version(root, "default") == 7
    say_held(root, "default", None)
    assert held_version(root, "default") is None
    (root / "flow" / "default.json").write_text("{")
    assert held_version(root, "default") is None


def test_rows_left_out_count_in_every_run(root: Path) -> None:
    """Rows with `training_enabled=False` are counted once over all runs."""
    write(root, *(part(i, training_enabled=i >= 3) for i in range(13)))
    result, _ = run(root, 1)
    assert result.excluded == {"training_disabled": 30}
    write(root, *(part(13 + i) for i in range(10)))
    result, _ = run(root, 1)
    assert result.excluded == {"training_disabled": 30}
    assert WeightStore(root, "default").manifest(3).metrics["rows_trained"] == 200


def test_a_pipe_in_the_place_of_what_is_held_keeps_nobody_waiting(root: Path) -> None:
    """A plain open of a FIFO would wait for a writer forever."""
    (root / "flow").mkdir()
    os.mkfifo(root / "flow" / "default.json")
    assert held_version(root, "default") is None
