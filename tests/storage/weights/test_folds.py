"""Fold policies are kept with their candidate, and damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import WeightsDamaged
from storage.experience.range_set import RangeSet
from storage.weights.folds import FOLD_WEIGHTS_FILE, FOLDS_FILE, Fold, Folds, fold_files
from storage.weights.store import WeightFolder


def folds() -> Folds:
    one = Fold({"w": np.array([1.0, 2.0], np.float32)}, {"mean": [0.5]}, {"s": RangeSet([(0, 4)])})
    two = Fold({"w": np.array([3.0, 4.0], np.float32)}, None, {"s": RangeSet([(0, 9)])})
    return Folds([one, two], {"s": RangeSet([(0, 14)])}, in_order=True)


def added(root: Path, kept: Folds | None) -> tuple[WeightFolder, str]:
    store = WeightFolder(root, "default", check=lambda candidate, weights: None)
    files = None if kept is None else fold_files(kept)
    weights: dict[str, Any] = {"w": np.zeros(2, np.float32)}
    digest = store.add_candidate(weights, spec={}, metrics={"a": 1}, lineage={}, folds=files)
    return store, digest


def test_what_was_kept_is_read_back_also_of_a_version(tmp_path: Path) -> None:
    store, digest = added(tmp_path, folds())
    live = store.publish(digest)
    found = store.folds(store.manifest(live.version).candidate)
    assert found is not None
    assert found.in_order
    assert [one.weights["w"].tolist() for one in found.folds] == [[1, 2], [3, 4]]
    assert [one.filter_state for one in found.folds] == [{"mean": [0.5]}, None]
    assert [one.seen["s"].ranges() for one in found.folds] == [[(0, 4)], [(0, 9)]]
    assert found.seen["s"].ranges() == [(0, 14)]
    assert set(store.manifest(live.version).digests) == {"weights.safetensors", "lineage.json"}, (
        "clients of release 0.1.0 accept no other files in a version"
    )


def test_without_folds_a_candidate_is_what_it_was(tmp_path: Path) -> None:
    store, digest = added(tmp_path, None)
    assert store.folds(digest) is None
    assert store.candidate(digest).metrics == {"a": 1}


@pytest.mark.parametrize("name", [FOLDS_FILE, FOLD_WEIGHTS_FILE])
def test_a_changed_file_is_refused(tmp_path: Path, name: str) -> None:
    store, digest = added(tmp_path, folds())
    path = tmp_path / "weights/default/candidates" / digest / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(WeightsDamaged):
        store.folds(digest)
