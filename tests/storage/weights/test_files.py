"""Files of a store are regular ones of a bounded size; anything else is damage, at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.errors import WeightsDamaged, WeightsNotFound, WeightStoreError
from storage.weights.files import PolicyFiles
from tests.storage.weights.any_weights import add, store_in


def test_a_fifo_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A FIFO in the place of any file of a store does not block, as a plain open would."""
    store = store_in(tmp_path)
    digest = add(store, 1.0)
    store.publish(digest)
    for name, read in (
        ("versions/1/manifest.json", lambda: store.manifest(1)),
        ("versions/1/weights.safetensors", lambda: store.read(1)),
        ("versions/1/lineage.json", lambda: store.lineage(1)),
        (f"candidates/{digest}/candidate.json", lambda: store.candidate(digest)),
        (f"candidates/{digest}/weights.safetensors", lambda: store.load_candidate(digest)),
    ):
        path = store.directory / name
        good = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(WeightsDamaged, match="expected a regular file"):
            read()
        path.unlink()
        path.write_bytes(good)
        read()


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    files = PolicyFiles(tmp_path, "default")
    files.objects.replace("weights/default/file", b"x" * 10)
    assert files.read("file", 10) == b"x" * 10
    with pytest.raises(WeightsDamaged, match="expected at most 9 bytes, got 10"):
        files.read("file", 9)
    with pytest.raises(WeightsNotFound):
        files.read("none", 10)


def test_a_folder_that_cannot_be_made_is_not_taken_for_one_that_is_there(tmp_path: Path) -> None:
    """Otherwise a candidate that does not exist would be reported as stored."""
    store = store_in(tmp_path)
    store.directory.mkdir(parents=True)
    (store.directory / "candidates").write_text("")
    with pytest.raises(WeightStoreError, match="cannot be written"):
        add(store, 1.0)


def test_a_pointer_is_small_before_anybody_parses_it(tmp_path: Path) -> None:
    """A live.json of megabytes counts as damaged, and its text is never parsed."""
    store = store_in(tmp_path)
    store.publish(add(store, 1.0))
    path = store.directory / "live.json"
    path.write_bytes(path.read_bytes() + b" " * 2**20)
    assert "expected at most 1048576 bytes" in store.pointer_damage()["live.json"]
