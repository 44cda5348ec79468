"""A rollback comes through while somebody else publishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import GenerationConflict
from storage.weights.manifest import Live
from storage.weights.store import WeightStore
from tests.storage.weights.any_weights import add, any_weights, value_of


class Overtaken(WeightStore):
    """Somebody publishes right before each of the first two rollbacks is made live."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "default", check=any_weights)
        self.theirs = [7.0, 8.0]

    def _point(self, version: int, *, pin: object = None, **given: object) -> Live:
        if pin is not None and self.theirs:
            self.publish(add(self, self.theirs.pop(0)))
        return super()._point(version, pin=pin, **given)  # type: ignore[arg-type]  # passed on


def test_a_trainer_that_publishes_meanwhile_does_not_keep_a_rollback_out(tmp_path: Path) -> None:
    """What was meant at first is live in the end, under the highest number, and pinned."""
    store = Overtaken(tmp_path)
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    live = store.rollback(by="a person")
    assert store.theirs == []
    assert (value_of(store, live.version), live.version) == (1.0, max(store.versions()))
    assert store.live() == live
    assert live.pinned is not None


def test_who_says_what_was_live_is_told_that_it_is_not_any_more(tmp_path: Path) -> None:
    """A publisher that compares before it acts."""
    store = Overtaken(tmp_path)
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    with pytest.raises(GenerationConflict):
        store.rollback(expected_generation=2)
