"""Fold policies of a candidate: weights of the same training on parts of its rows.

    {"in_order": true, "seen": {stream: [[first, last], ...]},
     "folds": [{"seen": {...}, "filter_state": {...}}, ...]}

A row that the candidate was trained on can be judged by a fold policy that has not seen it. `seen`
are ordinals, of the candidate and of each fold policy. `in_order`: fold i has only seen rows before
those that it is to judge. The weights are in a second file, with names `{fold}/{name}`. Both are in
the candidate's folder only: versions have its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.errors import WeightsDamaged
from storage.experience.range_set import RangeSet
from storage.weights.manifest import Json, Weights, encode_weights, open_document, seal_document

FOLDS_FILE = "folds.json"
FOLD_WEIGHTS_FILE = "folds.safetensors"
FOLDS_METRIC = "fold_files"
"""The entry of a candidate's metrics with the digests of both files. Clients get a version's
digests, and those of release 0.1.0 accept no others than of its weights and lineage."""


@dataclass(frozen=True, eq=False)
class Fold:
    """The weights of one fold policy, and the ordinals that it has seen."""

    weights: Weights
    filter_state: Mapping[str, Json] | None
    seen: Mapping[str, RangeSet]


@dataclass(frozen=True, eq=False)
class Folds:
    """All fold policies of a candidate, and the ordinals that the candidate itself has seen."""

    folds: Sequence[Fold]
    seen: Mapping[str, RangeSet]
    in_order: bool


def fold_files(folds: Folds) -> dict[str, bytes]:
    """The two files. Raises WeightsRefused for weights that are not finite numbers."""
    body: dict[str, Json] = {
        "in_order": folds.in_order,
        "seen": _plain(folds.seen),
        "folds": [
            {"seen": _plain(one.seen), "filter_state": one.filter_state} for one in folds.folds
        ],
    }
    weights = {
        f"{number}/{name}": array
        for number, one in enumerate(folds.folds)
        for name, array in one.weights.items()
    }
    return {FOLDS_FILE: seal_document("folds", body), FOLD_WEIGHTS_FILE: encode_weights(weights)}


def open_folds(document: bytes, arrays: Mapping[str, Any], where: str) -> Folds:
    """The fold policies in a document and the arrays of the second file. Raises WeightsDamaged."""
    body = open_document("folds", document, where)
    try:
        folds = [
            Fold(
                {
                    name.partition("/")[2]: array
                    for name, array in arrays.items()
                    if name.partition("/")[0] == str(number)
                },
                one["filter_state"],
                _ranges(one["seen"]),
            )
            for number, one in enumerate(body["folds"])
        ]
        return Folds(folds, _ranges(body["seen"]), bool(body["in_order"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WeightsDamaged(f"{where}: {error}") from error


def _plain(seen: Mapping[str, RangeSet]) -> dict[str, Json]:
    return {stream: ranges.to_json() for stream, ranges in seen.items()}


def _ranges(seen: Mapping[str, Json]) -> dict[str, RangeSet]:
    return {stream: RangeSet.from_json(ranges) for stream, ranges in seen.items()}
