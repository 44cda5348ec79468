"""The versions that collectors register as served, and how a rollback uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import WeightsNotFound
from storage.weights.served import FORGET_SECONDS, REGISTERED_SECONDS
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import NOON, add, record, store_in, value_of


@pytest.fixture
def store(tmp_path: Path) -> WeightFolder:
    found = store_in(tmp_path)
    for value in (1.0, 2.0, 3.0):
        found.publish(add(found, value))
    return found


def test_a_registration_ends_by_itself(store: WeightFolder) -> None:
    """A killed collector stops counting after 30 seconds; what it served stays known."""
    store.served.write(record(serves=3, served=((1, 3),)))
    assert store.served.registered(NOON + REGISTERED_SECONDS - 0.001) != []
    assert store.served.registered(NOON + REGISTERED_SECONDS) == []
    (kept,) = store.served.read()
    assert kept.served == [[1, 3]]
    store.served.forget(NOON + FORGET_SECONDS)
    assert store.served.read() == [kept]
    store.served.forget(NOON + FORGET_SECONDS + REGISTERED_SECONDS + 1)
    assert store.served.read() == []


def test_a_rollback_goes_to_what_was_served(store: WeightFolder) -> None:
    """Version 2 was never served, so it is unknown whether it can be."""
    store.served.write(record(serves=3, served=((1, 1), (3, 3))))
    assert value_of(store, store.rollback().version) == 1.0


def test_a_rollback_goes_past_what_was_refused(store: WeightFolder) -> None:
    """A version that one collector served and another could not is skipped."""
    store.served.write(record("a", serves=3, served=((1, 3),)))
    store.served.write(record("b", serves=1, served=((1, 1),), refused={"2": "other spaces"}))
    assert value_of(store, store.rollback().version) == 1.0


def test_a_copy_of_what_was_refused_is_as_unusable(store: WeightFolder) -> None:
    """A version that a rollback made has its own number, and the content of another."""
    store.rollback()  # 4, of 2
    store.resume()
    store.publish(add(store, 5.0))
    store.served.write(record(serves=5, served=((1, 5),), refused={"2": "other spaces"}))
    assert value_of(store, store.rollback().version) == 1.0


def test_rollbacks_in_a_row_never_come_to_what_was_rolled_back(store: WeightFolder) -> None:
    """Repeated rollbacks never restore version 3, which was rolled back, not even as a copy of a
    copy."""
    store.rollback()  # 4, of 2
    store.resume()
    store.publish(add(store, 5.0))
    found = [value_of(store, store.rollback().version) for _ in range(2)]
    assert found == [2.0, 1.0]


def test_without_a_better_one_a_rollback_goes_to_the_one_before(store: WeightFolder) -> None:
    """Where no collector ever said, and where what was served is not before it."""
    assert value_of(store, store.rollback().version) == 2.0
    store.served.write(record(serves=4, served=((3, 3),)))
    assert value_of(store, store.rollback().version) == 1.0


def test_a_rollback_to_nothing_usable_is_refused(store: WeightFolder) -> None:
    store.served.write(record(serves=3, served=((3, 3),), refused={"1": "x", "2": "y"}))
    with pytest.raises(WeightsNotFound, match="expected a usable version before 3"):
        store.rollback()
    assert value_of(store, store.rollback(to=2).version) == 2.0  # by name, a person may


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
def test_a_damaged_record_is_left_out(
    store: WeightFolder, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged record is left out with a line in the log; the others count."""
    good = record("good", serves=3)
    store.served.write(good)
    (store.directory / "served" / "bad.json").write_bytes(content)
    assert store.served.registered(NOON) == [good]
    assert "a record of a served version is left out" in caplog.text


def test_what_a_rollback_needs_is_not_pruned(store: WeightFolder) -> None:
    """The version that was served last, however long ago."""
    for value in range(4, 12):
        store.publish(add(store, float(value)))
    store.served.write(record(serves=3, served=((1, 3),)))
    store.prune(1)
    assert value_of(store, store.rollback().version) == 3.0
