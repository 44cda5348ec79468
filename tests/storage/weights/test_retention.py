"""Which versions are kept, for how long, and what stays known of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import WeightsNotFound
from storage.weights.retention import hourly
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import NOON, add, store_in, value_of

HOUR = 3600.0


class Clock:
    """Seconds since the epoch, as told."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def publish_every(store: WeightFolder, clock: Clock, seconds: float, count: int) -> None:
    for value in range(count):
        store.publish(add(store, float(value)))
        clock.now += seconds


def test_one_version_an_hour_stays_for_thirty_days(tmp_path: Path) -> None:
    """Besides the newest versions, the last one of each hour is kept until it is 30 days old."""
    clock = Clock()
    store = store_in(tmp_path, clock)
    publish_every(store, clock, HOUR / 4, 12)  # 13:13 is NOON: 1-4, 5-8 and 9-12 share an hour
    hours = {n: int((NOON + (n - 1) * HOUR / 4) // HOUR) for n in range(1, 13)}
    last = {max(n for n in hours if hours[n] == hour) for hour in hours.values()}
    store.prune(1)
    assert set(store.versions()) == last | {11, 12}  # 11: what a rollback would go to
    clock.now += 31 * 24 * HOUR
    store.prune(1)
    assert store.versions() == [11, 12]


def test_an_hour_keeps_its_last_version() -> None:
    created = {1: 0, 2: int(0.5 * HOUR * 1e6), 3: int(1.5 * HOUR * 1e6)}
    assert hourly(created, 2 * HOUR) == {2, 3}
    assert hourly(created, 30 * 24 * HOUR + HOUR) == {3}


def test_what_is_pruned_keeps_its_number_and_digests(tmp_path: Path) -> None:
    """A request for a pruned version gets its record; a torn line hides no other."""
    clock = Clock()
    store = store_in(tmp_path, clock)
    publish_every(store, clock, 1.0, 4)
    digests = {n: store.manifest(n).digests for n in store.versions()}
    candidate = store.manifest(1).candidate
    assert store.prune(1) == [1, 2]
    assert {n: one.digests for n, one in store.pruned().items()} == {n: digests[n] for n in (1, 2)}
    with pytest.raises(
        WeightsNotFound, match=f"version 1 was pruned; it was candidate {candidate}"
    ):
        store.load(1)
    with (store.directory / "pruned.jsonl").open("ab") as file:
        file.write(b'0123456789abcdef {"version":')
    store.publish(add(store, 9.0))
    store.prune(1)
    assert set(store.pruned()) == {1, 2, 3}


def test_a_rollback_finds_its_way_past_pruned_versions(tmp_path: Path) -> None:
    """The version before was pruned, and so was the one before that: names lead on."""
    clock = Clock()
    store = store_in(tmp_path, clock)
    publish_every(store, clock, HOUR, 2)
    publish_every(store, clock, 1.0, 6)
    store.prune(1)
    assert value_of(store, store.rollback().version) == 4.0
    store.prune(1)
    assert value_of(store, store.rollback().version) < 4.0


def test_a_trainers_unpublished_candidates_are_bounded(tmp_path: Path) -> None:
    """Of the candidates that a trainer could not publish, the newest stay; candidates of others all
    stay."""
    store = store_in(tmp_path)
    store.publish(add(store, 0.0, "follow"))
    mine = add(store, 0.5, "another")
    lost = [add(store, float(value), "follow") for value in range(1, 6)]
    store.prune(2)
    assert set(lost) < set(store.candidates())
    store.prune(2, checkpoint="follow")
    kept = {store.manifest(1).candidate, mine, *lost[-2:]}
    assert set(store.candidates()) == kept
