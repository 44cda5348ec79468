"""A reader's position: the delivered ordinals, and the identity of every row still inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.experience.interfaces import ReaderState
from storage.experience.sample_batch import ORDINAL, SampleBatch
from storage.reading.batching import join_rows
from storage.reading.exclusion import TRANSIENT, Excluded, Reason
from storage.reading.ledger import Ledger, decode_runs, encode_runs, positions
from storage.reading.listing import ShardFile
from storage.reading.loading import ROW, STREAM_INDEX, LoadedShard, fetch, run_starts
from storage.reading.retries import Retries
from storage.reading.sources import Content, ScanIncomplete, ShardSource
from storage.shards.names import ShardDamaged
from storage.shards.schema import ShardMetadata
from storage.system.formats import require_format

FORMAT_VERSION = 1
_STAGES = ("joiner", "window", "cutter")

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A saved position.

    `ledger` contains the ordinals that were delivered whole. The stages hold runs int64 (R, 4) of
    (index into `streams`, ordinal, first row of the part, count), in the order of their rows.
    """

    mode: str
    ledger: Ledger
    streams: tuple[str, ...]
    joiner: IntArray
    window: IntArray
    cutter: IntArray
    rng: dict[str, Any]

    @classmethod
    def of(
        cls,
        *,
        mode: str,
        taken: Ledger,
        streams: Sequence[str],
        joiner: Sequence[SampleBatch],
        window: Sequence[SampleBatch],
        cutter: Sequence[SampleBatch],
        rng: dict[str, Any],
    ) -> Position:
        """The position of a reader that has taken `taken` and holds these rows in its stages."""
        known = tuple(streams)
        stages = {"joiner": _runs(joiner), "window": _runs(window), "cutter": _runs(cutter)}
        pending = _ordinals(np.concatenate(list(stages.values())), known)
        return cls(mode=mode, ledger=taken.without(pending), streams=known, rng=rng, **stages)

    def pending(self) -> Ledger:
        """The ordinals of which some rows have not been delivered."""
        return _ordinals(np.concatenate([self.joiner, self.window, self.cutter]), self.streams)

    def taken(self) -> Ledger:
        """The ordinals that a reader which continues from here must not take from a shard again."""
        return self.ledger.union(self.pending())

    def to_json(self) -> dict[str, Any]:
        return {
            "version": FORMAT_VERSION,
            "mode": self.mode,
            "ledger": self.ledger.to_json(),
            "streams": list(self.streams),
            **{name: getattr(self, name).tolist() for name in _STAGES},
            "rng": self.rng,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Position:
        """Parse the result of `to_json`. Raises NewerFormat, and ReaderState for anything else."""
        require_keys(document, {"version", "mode", "ledger", "streams", "rng", *_STAGES})
        if not isinstance(document["streams"], list):
            raise ReaderState(f"streams: expected a list, got {document['streams']!r:.80}")
        streams = tuple(str(stream) for stream in document["streams"])
        return cls(
            mode=document["mode"],
            ledger=Ledger.from_json(document["ledger"]),
            streams=streams,
            rng=document["rng"],
            **{name: decode_runs(document[name], len(streams)) for name in _STAGES},
        )


def require_version(document: Mapping[str, Any], known: int, where: object = "position") -> None:
    """Raise NewerFormat or ReaderState for a position of another format than `known`."""
    try:
        require_format(document, known, where, "version")
    except ValueError as error:
        raise ReaderState(str(error)) from error


def require_keys(document: Any, wanted: set[str]) -> None:
    """Raise NewerFormat, or ReaderState, unless a document is a position with these keys."""
    if isinstance(document, Mapping):
        require_version(document, FORMAT_VERSION)
    if not isinstance(document, Mapping) or set(document) != wanted:
        found = sorted(document) if isinstance(document, Mapping) else repr(document)[:80]
        raise ReaderState(f"position: expected the keys {sorted(wanted)}, got {found}")


@dataclass(slots=True)
class RestoredRows:
    """The rows of a position, read again, by stage."""

    joiner: SampleBatch = field(default_factory=SampleBatch)
    window: SampleBatch = field(default_factory=SampleBatch)
    cutter: SampleBatch = field(default_factory=SampleBatch)
    metadata: ShardMetadata | None = None
    lost: dict[Reason, int] = field(default_factory=dict)  # why -> rows that are in no shard
    bad: list[Excluded] = field(default_factory=list)  # excluded shards that may hold some of them


def restore_rows(
    position: Position,
    source: ShardSource,
    load: Callable[[ShardFile, Content], LoadedShard],
    retries: Retries,
) -> RestoredRows | None:
    """Find the pending rows in the source's shards, in the order of the position.

    Returns None if some are missing that may be in a shard which cannot be read now (see
    `retries`).
    """
    result = RestoredRows()
    pending = position.pending()
    if not len(pending):
        return result
    pieces, indices = [], {}
    for loaded in _shards_with(pending, source, load, retries, result.bad):
        result.metadata = loaded.metadata
        pieces.append(loaded.rows)
        indices[loaded.shard.stream] = int(loaded.rows[STREAM_INDEX][0])
    base = join_rows(pieces)
    places = _places(base)
    for name in _STAGES:
        runs: IntArray = getattr(position, name)
        rows, lost = _pick(base, places, runs, [indices.get(s, -1) for s in position.streams])
        setattr(result, name, rows)
        for run, count in zip(runs.tolist(), lost, strict=True):
            if count:
                why = _why_lost(result.bad, position.streams[run[0]], run[1])
                result.lost[why] = result.lost.get(why, 0) + count
    if result.lost and retries:
        return None
    for key in retries.keys():  # noqa: SIM118  not a dict
        retries.settle(key)
    return result


def _why_lost(bad: Sequence[Excluded], stream: str, ordinal: int) -> Reason:
    for one in bad:
        if one.shard.stream == stream and one.shard.first <= ordinal <= one.shard.last:
            return one.reason
    return "vanished"


def _shards_with(
    pending: Ledger,
    source: ShardSource,
    load: Callable[[ShardFile, Content], LoadedShard],
    retries: Retries,
    bad: list[Excluded],
) -> list[LoadedShard]:
    """The shards, reduced to pending rows; each ordinal once.

    A file that cannot be read is skipped: another one may hold the same ordinals.
    """
    found, seen = [], Ledger()
    wanted = pending.streams()
    for shard in _scanned(source, retries):
        ranges = wanted.get(shard.stream)
        span = shard.last - shard.first + 1
        if ranges is None or len(ranges.missing(shard.first, shard.last)) == span:
            continue
        try:
            loaded = load(shard, fetch(source, shard).proven())
            retries.settle(shard)
        except FileNotFoundError:
            retries.settle(shard)
            continue
        except ShardDamaged as error:
            bad.append(Excluded(shard, error.reason, str(error)))
            continue
        except TRANSIENT as error:
            retries.failed(shard, shard.place, error)
            continue
        if not loaded.rows.count:
            continue
        ordinals = loaded.rows[ORDINAL]
        mask = pending.contains(shard.stream, ordinals) & ~seen.contains(shard.stream, ordinals)
        if mask.any():
            seen.add(shard.stream, ordinals[mask])
            rows = loaded.rows.take(mask)
            found.append(LoadedShard(shard, loaded.metadata, loaded.nbytes, loaded.parts, rows))
    return found


def _scanned(source: ShardSource, retries: Retries) -> list[ShardFile]:
    try:
        return source.scan()
    except ScanIncomplete as partial:
        for folder, error in partial.errors.items():
            retries.failed(folder, folder, error)
        return partial.found


def _places(base: SampleBatch) -> dict[tuple[int, int], tuple[int, int]]:
    """(stream index, ordinal) -> (its first row in `base`, its number of rows)."""
    if not base.count:
        return {}
    starts = run_starts(base[STREAM_INDEX], base[ORDINAL])
    sizes = np.diff(np.append(starts, base.count)).tolist()
    keys = zip(base[STREAM_INDEX][starts].tolist(), base[ORDINAL][starts].tolist(), strict=True)
    return dict(zip(keys, zip(starts.tolist(), sizes, strict=True), strict=True))


def _pick(
    base: SampleBatch,
    places: Mapping[tuple[int, int], tuple[int, int]],
    runs: IntArray,
    indices: Sequence[int],
) -> tuple[SampleBatch, list[int]]:
    """(the rows of the runs in their order, the number of rows not found for each run)."""
    starts, counts, lost = [], [], []
    for stream, ordinal, row, count in runs.tolist():
        start, size = places.get((indices[stream], ordinal), (0, 0))
        there = max(0, min(count, size - row))
        lost.append(count - there)
        starts.append(start + row)
        counts.append(there)
    at = positions(np.array(starts, np.int64), np.array(counts, np.int64))
    return base.take(at), lost


def _runs(pieces: Sequence[SampleBatch]) -> IntArray:
    filled = [piece for piece in pieces if piece.count]
    if not filled:
        return np.zeros((0, 4), np.int64)
    joined = [
        np.concatenate([piece[name] for piece in filled]).astype(np.int64)
        for name in (STREAM_INDEX, ORDINAL, ROW)
    ]
    return np.array(encode_runs(*joined), np.int64)


def _ordinals(runs: IntArray, streams: Sequence[str]) -> Ledger:
    """The ordinals of runs int64 (R, 4)."""
    result = Ledger()
    for index, stream in enumerate(streams):
        result.add(stream, runs[runs[:, 0] == index, 1])
    return result
