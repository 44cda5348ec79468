"""The lineage of weights: the rows that they were trained on.

    {"streams": {stream: [[first, last], ...]}, "untrained": {stream: [[ordinal, row, count], ...]}}

`streams` are the ordinals of the parts with at least one row that was trained on; usually that is
every row of the part. `untrained` are runs of rows of these parts that were not trained on, because
they were excluded, or because an update ended within the part. Rows count from 0 within their part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from storage.errors import WeightsDamaged
from storage.experience.range_set import RangeSet
from storage.weights.manifest import Json, open_document, seal_document

Lineage: TypeAlias = Mapping[str, RangeSet | Iterable[Iterable[int]]]
Untrained: TypeAlias = Mapping[str, Sequence[Sequence[int]]]


def lineage_document(lineage: Lineage, untrained: Untrained) -> bytes:
    """The bytes of `lineage.json`. Raises ValueError for invalid ranges or runs."""
    body: dict[str, Json] = {"streams": _ranges_of(lineage)}
    if untrained:
        body["untrained"] = {stream: _runs(stream, runs) for stream, runs in untrained.items()}
    return seal_document("lineage", body)


def open_lineage(data: bytes, where: str) -> dict[str, RangeSet]:
    """stream -> the ordinals in a lineage's bytes. Raises WeightsDamaged, naming `where`."""
    streams = open_document("lineage", data, where)["streams"]
    return {stream: RangeSet.from_json(ranges) for stream, ranges in streams.items()}


def open_untrained(data: bytes, where: str) -> dict[str, list[list[int]]]:
    """stream -> runs of rows in a lineage's bytes. Raises WeightsDamaged, naming `where`."""
    body = open_document("lineage", data, where)
    try:
        untrained: dict[str, list[list[int]]] = body.get("untrained", {})
        return {stream: _runs(stream, runs) for stream, runs in untrained.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise WeightsDamaged(f"{where}: {error}") from error


def _ranges_of(lineage: Lineage) -> dict[str, list[list[int]]]:
    found = {}
    for stream, ranges in lineage.items():
        try:
            known = ranges if isinstance(ranges, RangeSet) else RangeSet((a, b) for a, b in ranges)
        except ValueError as error:
            raise ValueError(f"lineage.{stream:.80}: {error}") from error
        found[stream] = known.to_json()
    return found


def _runs(stream: str, runs: Sequence[Sequence[int]]) -> list[list[int]]:
    listed = [[int(number) for number in run] for run in runs]
    for run in listed:
        if len(run) != 3 or min(run) < 0 or run[2] < 1:
            raise ValueError(
                f"untrained.{stream:.80}: expected [ordinal, first row, count], got {run!r:.80}"
            )
    return listed
