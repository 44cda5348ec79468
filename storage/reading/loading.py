"""From one shard's bytes to verified, decoded and filtered columns, in the prefetch thread.

Parts whose shard is not written yet give the same columns.

Rows are a `SampleBatch` with internal columns next to the public ones: `_stream` (int32, an index),
`_row` (int32, the row within its ordinal), `_final` (bool: the row's next observation is a part's
stored final observation).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from storage.experience.interfaces import ReaderError
from storage.experience.sample_batch import (
    ACTION_LOGP,
    AGENT_ID,
    EPISODE_ORDINAL,
    EPS_ID,
    HAS_NEXT_OBS,
    NEXT_OBS,
    OBS,
    ORDINAL,
    POLICY_ID,
    POLICY_VERSION,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    T,
)
from storage.experience.step_columns import ADDED_COLUMNS
from storage.reading.exclusion import Reason
from storage.reading.listing import ShardFile
from storage.reading.sources import Content, ShardSource
from storage.shards.arrow_arrays import decode_values
from storage.shards.content import (
    bounded_actions,
    check_alike,
    check_choices,
    check_column,
    check_endings,
    check_finals,
    check_footer,
    check_runs,
)
from storage.shards.decoded_size import check_size
from storage.shards.digests import digest_of
from storage.shards.footers import own_footer
from storage.shards.names import ShardDamaged
from storage.shards.part_block import UnwrittenParts
from storage.shards.schema import ShardMetadata, metadata_for, stored_names, with_defaults
from storage.shards.stored_tables import in_memory, memory_names
from storage.shards.tables import BlockColumns

Array: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]

STREAM_INDEX, ROW, FINAL = "_stream", "_row", "_final"
ENDED, TAGS, CONTINUES = "ended", "tags", "continues"
TRAINING_ENABLED, TS = "training_enabled", "ts"

DEFAULT_COLUMNS = (
    OBS,
    "actions",
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    NEXT_OBS,
    HAS_NEXT_OBS,
    EPS_ID,
    T,
    AGENT_ID,
    ACTION_LOGP,
    POLICY_ID,
    POLICY_VERSION,
)
"""The default columns of a batch; `obs` includes `obs.<path>`."""

IDENTITY = (T, ORDINAL, EPISODE_ORDINAL)
"""Always read: rows are counted, ordered and joined by these columns."""

EPISODE_COLUMNS = (EPS_ID, AGENT_ID, POLICY_ID, TRAINING_ENABLED, CONTINUES, TAGS, ENDED)
"""The columns with one value per episode that an `Episode` has."""

_TEXTS = [EPS_ID, AGENT_ID, ENDED, POLICY_ID, "source", CONTINUES, TAGS]
_DERIVED = (NEXT_OBS, HAS_NEXT_OBS, "stream", ROW)


@dataclass(frozen=True, slots=True)
class PartFilter:
    """Selects parts by their first step.

    `since`/`until`: limits of the client's `ts`, microseconds since the epoch, since <= ts < until.
    `tags`: name -> the value that is required. `training_disabled`: whether to include parts with
    training_enabled=False.
    """

    policy_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    since: int | None = None
    until: int | None = None
    training_disabled: bool = False

    def columns(self) -> list[str]:
        """The columns that `judge` needs."""
        wanted = {
            POLICY_ID: self.policy_id is not None,
            TAGS: bool(self.tags),
            TS: self.since is not None or self.until is not None,
            TRAINING_ENABLED: not self.training_disabled,
        }
        return [name for name, needed in wanted.items() if needed]

    def judge(self, firsts: Mapping[str, Array]) -> npt.NDArray[np.int8]:
        """The verdict on each part by its first step: int8 (P,).

        0 means keep; other values are 1 + an index into `REASONS`.
        """
        count = len(next(iter(firsts.values())))
        verdict = np.zeros(count, np.int8)
        if self.since is not None or self.until is not None:
            low = -(2**63) if self.since is None else self.since
            high = 2**63 - 1 if self.until is None else self.until - 1
            verdict[(firsts[TS] < low) | (firsts[TS] > high)] = 4
        if self.tags:
            verdict[~self._tagged(firsts[TAGS])] = 3
        if self.policy_id is not None:
            verdict[firsts[POLICY_ID] != self.policy_id] = 2
        if not self.training_disabled:
            verdict[~firsts[TRAINING_ENABLED]] = 1
        return verdict

    def _tagged(self, texts: Array) -> npt.NDArray[np.bool_]:
        """Whether each row has the wanted tags; each distinct text is parsed once."""
        listed = texts.tolist()
        wanted = self.tags.items()
        fits = {text: wanted <= json.loads(text).items() for text in set(listed)}
        return np.fromiter((fits[text] for text in listed), np.bool_, len(listed))


REASONS: tuple[Reason, ...] = ("training_disabled", "other_policy", "tags", "time")
"""Why a part was excluded, in the order of `PartFilter.judge`."""


@dataclass(frozen=True, slots=True)
class PartTable:
    """The parts of a shard, in the order of their rows: arrays (P,)."""

    ordinals: npt.NDArray[np.int64]
    episodes: npt.NDArray[np.int64]  # the ordinals of their episodes' first parts
    steps: npt.NDArray[np.int64]
    verdicts: npt.NDArray[np.int8]  # 0: its rows are in `LoadedShard.rows`

    def kept(self, wanted: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], bool]:
        """(mask over the kept rows: those of parts in `wanted`, whether that is all of them).

        `wanted`: bool (P,).
        """
        kept = self.verdicts == 0
        return np.repeat(wanted[kept], self.steps[kept]), bool(wanted[kept].all())


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A decoded shard: all its parts, and the rows of those that the filter keeps."""

    shard: ShardFile
    metadata: ShardMetadata
    nbytes: int
    parts: PartTable
    rows: SampleBatch


@dataclass(frozen=True, slots=True)
class _OpenedShard:
    """The columns of a shard, written or not; `read` returns some of them as a table."""

    metadata: ShardMetadata
    names: Sequence[str]
    read: Callable[[list[str]], pa.Table]


class ShardLoader:
    """Decodes bytes to a `LoadedShard`. Thread-safe, as it has no state.

    `columns` are public names; `parts` selects the parts whose rows to decode.
    """

    def __init__(self, columns: Sequence[str], parts: PartFilter) -> None:
        self.columns = tuple(columns)
        self.filter = parts

    def load(self, shard: ShardFile, content: Content, stream_index: int) -> LoadedShard:
        """Decode a shard that `fetch` found intact. Raises ShardDamaged for invalid content."""
        if isinstance(content, UnwrittenParts):
            return self._load_parts(shard, content, stream_index)
        with (
            _content_named(shard.place),
            pq.ParquetFile(
                pa.BufferReader(content), read_dictionary=_TEXTS, pre_buffer=False
            ) as file,
        ):
            schema = file.schema_arrow
            metadata = ShardMetadata.from_footer(schema.metadata, shard.place)
            check_footer(schema, metadata, shard.stream, shard.first, shard.last)
            there = memory_names(schema.names, metadata.columns)
            names = [*dict.fromkeys((*there, *(c.name for c in ADDED_COLUMNS)))]
            opened = _OpenedShard(metadata, names, partial(_bounded, file, content, metadata))
            self._require(opened)
            parts, rows = self._decode(opened, stream_index)
        return LoadedShard(shard, metadata, len(content), parts, rows)

    def _load_parts(
        self, shard: ShardFile, found: UnwrittenParts, stream_index: int
    ) -> LoadedShard:
        """The same columns as from the shard that these parts will be written to."""
        block = found.block
        metadata, schema = metadata_for(
            shard.stream,
            found.canonical_json,
            ((shard.first, shard.last),),
            rows=block.rows,
            parts=len(block.scalars.steps),
        )
        table = BlockColumns(block, metadata, schema).table(0, block.rows)
        opened = _OpenedShard(
            metadata, schema.names, lambda names: _with_dictionaries(table, names)
        )
        parts, rows = self._decode(opened, stream_index)
        return LoadedShard(shard, metadata, block.nbytes, parts, rows)

    def _decode(self, opened: _OpenedShard, stream_index: int) -> tuple[PartTable, SampleBatch]:
        parts, keys, runs = self._parts(opened)
        return parts, self._rows(opened, parts, keys, runs, stream_index)

    def _parts(self, opened: _OpenedShard) -> tuple[PartTable, dict[str, Array], IntArray]:
        """(the parts, the columns to identify and filter them, the first rows of agents' runs)."""
        names = [*IDENTITY, *self.filter.columns()]
        table = opened.read(names)
        keys = _checked(table, names, opened.metadata)
        ordinals = keys[ORDINAL]
        runs = check_runs(
            ordinals,
            keys[T],
            keys[EPISODE_ORDINAL],
            lambda: column_of(opened.read([AGENT_ID]), AGENT_ID, opened.metadata),
            opened.metadata,
        )
        check_alike(table, runs)
        starts = runs[run_starts(ordinals[runs])]  # agents may share an ordinal
        steps = np.diff(np.append(starts, len(ordinals)))
        firsts = {name: keys[name][starts] for name in names}
        verdicts = self.filter.judge(firsts)
        return PartTable(firsts[ORDINAL], firsts[EPISODE_ORDINAL], steps, verdicts), keys, runs

    def _rows(
        self,
        opened: _OpenedShard,
        parts: PartTable,
        keys: Mapping[str, Array],
        runs: IntArray,
        stream_index: int,
    ) -> SampleBatch:
        kept = parts.verdicts == 0
        if not kept.any():
            return SampleBatch()
        names = [name for name in self._stored(opened.metadata) if name not in keys]
        metadata = opened.metadata
        bounded = [name for name in bounded_actions(metadata) if name in names]
        unasked = [TAGS, *(["source"] if bounded else [])]
        table = opened.read(list(dict.fromkeys([*names, *unasked])))
        columns = _checked(table, [name for name in names if not _is_final(name)], metadata)
        columns.update(keys)
        check_alike(table, runs)
        for name in unasked:
            check_column(table.column(name), None, metadata, name)
        if bounded:
            check_choices(table.column("source"), columns, metadata)
        count = len(keys[T])
        if TERMINATEDS in columns and TRUNCATEDS in columns:
            check_endings(runs, columns, columns.get(ENDED))
        if NEXT_OBS in self.columns or HAS_NEXT_OBS in self.columns:
            columns.update(_next_columns(columns, table, runs, metadata))
        starts = np.cumsum(parts.steps) - parts.steps
        row = np.arange(count, dtype=np.int32)
        columns[ROW] = row - np.repeat(starts.astype(np.int32), parts.steps)
        columns[STREAM_INDEX] = np.broadcast_to(np.int32(stream_index), (count,))
        rows = SampleBatch(columns)
        return rows if kept.all() else rows.take(np.repeat(kept, parts.steps))

    def _require(self, opened: _OpenedShard) -> None:
        """Raise ReaderError if a requested column is not in this shard."""
        unknown = [name for name in self._stored(opened.metadata) if name not in opened.names]
        if unknown:
            raise ReaderError(f"expected columns of {', '.join(opened.names)}, got {unknown}")

    def _stored(self, metadata: ShardMetadata) -> list[str]:
        """The stored columns that are needed for the requested ones."""
        prefixes = [name for name in self.columns if name not in _DERIVED]
        if NEXT_OBS in self.columns or HAS_NEXT_OBS in self.columns:
            prefixes += [OBS, "final_obs", TERMINATEDS]
        leaves = [name for name in metadata.columns if name.partition(".")[0] in prefixes]
        return list(dict.fromkeys([*leaves, *(p for p in prefixes if p not in _LEAF_PREFIXES)]))


_LEAF_PREFIXES = (OBS, "actions", "final_obs", "action_dist_inputs")


def check_digest(shard: ShardFile, content: bytes | memoryview) -> None:
    """Raise ShardDamaged unless the content's digest begins with the one in the name."""
    digest = digest_of(content)[:16]
    if digest != shard.digest16:
        raise ShardDamaged(
            f"{shard.place}: expected digest {shard.digest16}, found {digest}", "damaged"
        )


@dataclass(frozen=True, slots=True)
class Fetched:
    """A shard's content as its source returned it, and the error of reading or verifying it."""

    content: Content | None
    error: Exception | None

    @property
    def nbytes(self) -> int:
        """The size of a file; 0 for parts that are not written yet."""
        return len(self.content) if isinstance(self.content, bytes | memoryview) else 0

    def proven(self) -> Content:
        """The content. Raises ShardDamaged if its digest does not match the name, and OSError."""
        if self.error is not None or self.content is None:
            raise self.error or ValueError("expected a shard's content, got none")
        return self.content


def fetch(source: ShardSource, shard: ShardFile) -> Fetched:
    """Read one shard and compare its digest with its name, without decoding it."""
    content = None
    try:
        content = source.read(shard)
        if not isinstance(content, UnwrittenParts):
            check_digest(shard, content)
    except Exception as error:  # raised by `Fetched.proven`
        return Fetched(content, error)
    return Fetched(content, None)


def stated_rows(shard: ShardFile, content: Content | None) -> int | None:
    """The number of rows of an excluded shard, if its footer says it and fits its name.

    Raises nothing: the content may have failed its digest.
    """
    if content is None or isinstance(content, UnwrittenParts):
        return None
    found = own_footer(bytes(content), shard.place)
    if found is None:
        return None
    footer, name = found[0], (shard.stream, shard.first, shard.last)
    return footer.rows if (footer.stream, footer.first, footer.last) == name else None


def _is_final(name: str) -> bool:
    return name.partition(".")[0] == "final_obs"


def _next_columns(
    columns: Mapping[str, Array],
    table: pa.Table,
    starts: IntArray,
    metadata: ShardMetadata,
) -> dict[str, Array]:
    """Derive `new_obs[.path]`, `has_new_obs` and `_final` from the next rows and final_obs.

    Within a part new_obs[t] = obs[t + 1]; in its last row it is the stored final observation, or
    zeros without one. `starts`: the first rows of the parts (P,).
    """
    count = len(columns[T])
    lasts = np.append(starts[1:], count) - 1
    stored, finals = check_finals(table, starts, metadata)
    result: dict[str, Array] = {}
    for name, values in finals.items():
        path = name.removeprefix("final_obs")
        obs = columns[f"{OBS}{path}"]
        shifted = np.empty_like(obs)
        shifted[:-1] = obs[1:]
        if len(stored) < len(lasts):
            shifted[lasts] = "" if obs.dtype == np.dtype(object) else 0
        shifted[stored] = values
        result[f"{NEXT_OBS}{path}"] = shifted
    result[FINAL] = np.zeros(count, np.bool_)
    result[FINAL][stored] = True
    result[HAS_NEXT_OBS] = np.ones(count, np.bool_)
    result[HAS_NEXT_OBS][lasts] = columns[TERMINATEDS][lasts]
    result[HAS_NEXT_OBS][stored] = True
    return result


def _checked(table: pa.Table, names: Sequence[str], metadata: ShardMetadata) -> dict[str, Array]:
    """Columns as numpy arrays whose content has been checked."""
    columns = {}
    for name in names:
        values = columns[name] = column_of(table, name, metadata)
        check_column(table.column(name), values, metadata, name)
    return columns


def _bounded(
    file: pq.ParquetFile, content: bytes | memoryview, metadata: ShardMetadata, names: list[str]
) -> pa.Table:
    schema = file.schema_arrow
    stored = [n for n in stored_names(names, metadata.columns) if n in schema.names]
    check_size(len(content), file.metadata, schema, stored)
    table = in_memory(file.read(columns=stored, use_threads=False), metadata)
    return with_defaults(table, names)


@contextmanager
def _content_named(place: str) -> Iterator[None]:
    """Raise ShardDamaged for anything that cannot be decoded although the digest is right.

    Errors that are not due to the content pass: too little memory, and columns that no shard has.
    """
    try:
        yield
    except (MemoryError, ReaderError):  # includes Arrow's own error for this
        raise
    except ShardDamaged as error:
        text = str(error)
        raise ShardDamaged(text if text.startswith(place) else f"{place}: {text}") from error
    except Exception as error:
        raise ShardDamaged(f"{place}: cannot be decoded: {error!r:.300}") from error


def column_of(table: pa.Table, name: str, metadata: ShardMetadata) -> Array:
    """A column as numpy; texts read as dictionaries become an array of shared strings."""
    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        only = {_only_text(chunk) for chunk in column.chunks}
        if len(only) == 1 and None not in only:
            return np.broadcast_to(np.array([only.pop()], object), (len(column),))
        pieces = [_texts(chunk) for chunk in column.chunks]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, object)
    return decode_values(column, metadata.specs.get(name))


def _with_dictionaries(table: pa.Table, names: list[str]) -> pa.Table:
    """Some columns, with texts as dictionaries, as reading a file returns them."""
    columns = [
        table.column(name).dictionary_encode() if name in _TEXTS else table.column(name)
        for name in names
    ]
    return pa.Table.from_arrays(columns, names).replace_schema_metadata(table.schema.metadata)


def _only_text(chunk: pa.DictionaryArray) -> str | None:
    """The text of all rows, None if they differ."""
    alone = len(chunk.dictionary) == 1 and not chunk.null_count
    return chunk.dictionary[0].as_py() if alone else None


def _texts(chunk: pa.DictionaryArray) -> Array:
    """An object array (N,): one string object for each distinct value, None for null."""
    known = np.empty(len(chunk.dictionary) + 1, object)
    known[:-1] = chunk.dictionary.to_numpy(zero_copy_only=False)
    if len(known) == 2 and not chunk.null_count:
        return np.broadcast_to(known[:1], (len(chunk),))
    codes = chunk.indices
    if codes.null_count:
        codes = codes.fill_null(len(known) - 1)
    gathered: Array = known[codes.to_numpy()]
    return gathered


# --- runs of rows ----------------------------------------------------------------------------


def run_starts(*keys: Array) -> npt.NDArray[np.int64]:
    """The rows at which any of the keys (N,) differs from the row before; row 0 first."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    breaks = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        breaks = breaks | (key[1:] != key[:-1])
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))
