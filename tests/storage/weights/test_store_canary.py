"""A canary next to the live version: when it may start, what it blocks, how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import LeaseHeld, PolicyPinned, WeightsNotFound
from storage.weights.lease import Lease
from storage.weights.manifest import Live
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import add, any_weights, store_in, value_of


@pytest.fixture
def store(tmp_path: Path) -> WeightFolder:
    store = store_in(tmp_path)
    store.publish(add(store, 1.0))
    return store


def test_a_canary_stands_beside_what_is_live(store: WeightFolder) -> None:
    """Starting it again changes nothing; another share is another generation."""
    second = add(store, 2.0)
    live = store.start_canary(second, 0.1)
    assert live == Live(generation=2, version=1, canary_version=2, canary_share=0.1)
    assert store.start_canary(second, 0.1) == live
    wider = store.start_canary(second, 0.5)
    assert (wider.generation, wider.canary_version, wider.canary_share) == (3, 2, 0.5)


def test_nothing_else_is_published_while_a_canary_is_on(store: WeightFolder) -> None:
    """A publication would silently end the comparison; the error names the commands that end it."""
    store.start_canary(add(store, 2.0), 0.1)
    third = add(store, 3.0)
    for publish in (store.publish, lambda d: store.publish_as(d, 3)):
        with pytest.raises(PolicyPinned, match="headrace promote"):
            publish(third)
    with pytest.raises(PolicyPinned, match="a canary"):
        store.start_canary(third, 0.1)


def test_promoted_it_is_live_and_publishing_goes_on(store: WeightFolder) -> None:
    store.start_canary(add(store, 2.0), 0.1)
    assert store.promote_canary() == Live(generation=3, version=2)
    assert store.publish(add(store, 3.0)).version == 3
    with pytest.raises(WeightsNotFound, match="expected a running canary"):
        store.promote_canary()


def test_rolled_back_what_is_live_stays_and_is_pinned(store: WeightFolder) -> None:
    """A canary's rollback leaves the live version in place and pins it, so that no trainer or job
    undoes it."""
    store.start_canary(add(store, 2.0), 0.1)
    live = store.rollback(by="a person")
    assert (live.version, live.canary_version, live.generation) == (1, None, 3)
    assert live.pinned is not None
    assert "canary, version 2" in live.pinned.why
    with pytest.raises(PolicyPinned):
        store.publish(add(store, 3.0))
    assert value_of(store, 1) == 1.0


def test_a_follower_is_paused_before_a_canary(store: WeightFolder, tmp_path: Path) -> None:
    """A canary cannot start while a follower runs unpaused: the follower's next version would be in
    both arms."""
    second = add(store, 2.0)
    lease = Lease.take(store.files)
    now = WeightFolder(tmp_path, "default", check=any_weights)  # by the clock of the lease
    try:
        with pytest.raises(LeaseHeld, match="headrace pause"):
            now.start_canary(second, 0.1)
        assert now.versions() == [1]
        pin, new = now.pause(by="a person", why="a canary")
        assert (new, pin.why) == (True, "a canary")
        assert now.pause(why="another") == (pin, False)
        live = now.start_canary(second, 0.1)
        assert (live.canary_version, live.pinned) == (2, pin)
        assert now.promote_canary().pinned == pin, "it is paused until somebody resumes it"
        assert now.resume() == pin
    finally:
        lease.release()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_is_a_part(store: WeightFolder, share: float) -> None:
    with pytest.raises(ValueError, match="share above 0 and below 1"):
        store.start_canary(add(store, 2.0), share)


def test_a_canary_is_compared_with_something_else(store: WeightFolder, tmp_path: Path) -> None:
    """A canary is refused without a live version, and if it has the weights of the live one."""
    with pytest.raises(ValueError, match="is live already, as version 1"):
        store.start_canary(add(store, 1.0), 0.1)
    empty = WeightFolder(tmp_path, "other", check=any_weights)
    with pytest.raises(
        WeightsNotFound, match=r"`headrace publish` makes .* --no-gate` if the gate"
    ):
        empty.start_canary(add(empty, 1.0), 0.1)
