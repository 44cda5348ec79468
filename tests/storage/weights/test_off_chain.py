"""Versions off the chain, and damaged ones, are shown as such; damage stops nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.errors import WeightStoreError
from storage.objects import folder
from storage.system.files import FileLock
from storage.verify.audit import Trained, verify
from storage.weights.off_chain import described, mark_off_chain, marked, off_chain
from tests.storage.weights.any_weights import add, store_in


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))


def test_a_version_off_the_chain_is_shown_as_such(tmp_path: Path) -> None:
    """In the list that `versions` prints, and as a note of `verify`, which finds nothing wrong."""
    store = store_in(tmp_path)
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    mark_off_chain(store.files, 1, "its checkpoint is lost")
    assert off_chain(store.files, 2) is None
    listed, damaged = described(store)
    assert [(one["version"], one["off_chain"]) for one in listed] == [
        (1, "its checkpoint is lost"),
        (2, None),
    ]
    assert damaged == {}
    report = verify(tmp_path, None, Trained.of(tmp_path))
    assert report.ok
    note = "weights/default/versions/1 is off the chain: its checkpoint is lost"
    assert note in report.notes


def test_a_damaged_version_is_named_and_the_others_are_listed(tmp_path: Path) -> None:
    """`headrace versions` is what people look at when something is wrong."""
    store = store_in(tmp_path)
    for value in (1.0, 2.0, 3.0):
        store.publish(add(store, value))
    flip(store.directory / "versions" / "2" / "manifest.json")
    listed, damaged = described(store)
    assert [one["version"] for one in listed] == [1, 3]
    assert list(damaged) == [2]
    assert "does not match its digest" in damaged[2]


def test_pruning_leaves_damaged_versions_and_candidates_where_they_are(tmp_path: Path) -> None:
    """Damaged versions and candidates stay for inspection; pruning removes the others as usual."""
    store = store_in(tmp_path)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        store.publish(add(store, value))
    waiting = [add(store, value, "follow") for value in (6.0, 7.0, 8.0)]
    flip(store.directory / "versions" / "2" / "manifest.json")
    flip(store.directory / "candidates" / waiting[0] / "candidate.json")
    assert store.prune(1, checkpoint="follow") == [1, 3]  # 4: a rollback goes there
    assert store.versions() == [2, 4, 5]
    assert set(waiting) - set(store.candidates()) == {waiting[1]}


@pytest.mark.parametrize("name", ["\u00b2", "01", "0", "1x", "-1"])
def test_other_names_among_the_versions_are_none(tmp_path: Path, name: str) -> None:
    """A superscript two is a digit to Python, and no number."""
    store = store_in(tmp_path)
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    (store.directory / "versions" / name).mkdir()
    (store.directory / "versions" / name / "off_chain.json").write_text("{}")
    assert store.versions() == [1, 2]
    assert marked(store.files) == []
    assert store.rollback().version == 3


def test_a_fifo_among_the_names_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The mark of a version, the names of removed ones, and a candidate without a description."""
    store = store_in(tmp_path)
    for value in (1.0, 2.0, 3.0):
        store.publish(add(store, value))
    os.mkfifo(store.directory / "versions" / "2" / "off_chain.json")
    os.mkfifo(store.directory / "pruned.jsonl")
    (store.directory / "candidates" / "stray").mkdir()
    assert list(described(store)[1]) == [2]
    assert store.pruned() == {}
    assert store.prune(1, checkpoint="follow") == [1]
    assert list(store.pruned()) == [1]


def test_a_lock_that_is_held_for_long_is_an_error_that_names_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped during a publication blocks others, which get an error."""
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.0)
    store = store_in(tmp_path)
    digest = add(store, 1.0)
    lock = FileLock(store.directory / "lock")
    lock.acquire()
    with pytest.raises(WeightStoreError, match=f"process {lock.holder()} holds .*: it is writing"):
        store.publish(digest)
    lock.release()
    assert store.publish(digest).version == 1
