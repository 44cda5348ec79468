"""A block of parts as Arrow tables, a run of rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.experience.endings import ENDINGS, TERMINATED
from storage.experience.step_columns import STEP_COLUMNS, StepColumn
from storage.shards.arrow_arrays import (
    LeafValues,
    RecordSplitter,
    RepeatedText,
    Texts,
    coded,
    items_array,
    leaf_array,
    sparse_items,
    sparse_leaf,
    starts_of,
)
from storage.shards.names import ShardError
from storage.shards.part_block import PartBlock
from storage.shards.schema import (
    DIST_INPUTS,
    ColumnSpec,
    ShardMetadata,
    coded_schema,
    final_specs,
    leaf_specs,
)

_ENDINGS = pa.array(ENDINGS)
_WORDS = {column.name: pa.array(column.words) for column in STEP_COLUMNS if column.words}
_CODES: dict[str | None, int] = {None: -1, **{word: code for code, word in enumerate(ENDINGS)}}
_TERMINATED = np.array([word in TERMINATED for word in (*ENDINGS, None)])  # by code, -1 for null


class BlockColumns:
    """The columns of a block, checked against its schema; `table` returns ranges of their rows.

    Raises ShardError if buffers, lengths and step counts do not fit each other.
    """

    def __init__(self, block: PartBlock, metadata: ShardMetadata, schema: pa.Schema) -> None:
        scalars = block.scalars
        self._block = block
        self.schema = coded_schema(schema)
        self._steps = np.array(scalars.steps, np.int64)
        self.rows = int(self._steps.sum())
        self._starts = starts_of(self._steps)
        self._last_rows = self._starts[1:] - 1
        observation, action = metadata.space_pair()
        self._obs = _BlockValues(
            "obs", leaf_specs(observation, "obs"), observation, self.rows, block
        )
        self._actions = _BlockValues(
            "actions", leaf_specs(action, "actions"), action, self.rows, block
        )
        self._final = _final_columns(block, self._obs.splitter, final_specs(observation))
        given = np.array([data is not None for data in scalars.final_obs], np.bool_)
        self._final_rows = self._last_rows[given]
        self._numbers = {
            column.name: _buffer(column.name, data, column.dtype, self.rows)
            for column in STEP_COLUMNS
            if (data := getattr(block, column.name)) or not column.sparse
        }
        for column in STEP_COLUMNS:
            if column.words and (largest := self._numbers[column.name].max()) > column.high:
                raise ShardError(f"{column.name}: expected {column.expected}, got {largest}")
        self._texts = self._repeated_texts()
        self._dist = _dist_inputs(block, self.rows)
        self._agents = np.array(scalars.agents, np.int32)
        self._ended = np.array([_CODES[word] for word in scalars.ended], np.int8)
        infos = [text.encode() for text in scalars.infos]
        self._infos = Texts(
            starts_of(np.array([len(text) for text in infos], np.int64)),
            np.frombuffer(b"".join(infos), np.uint8),
        )
        self._info_rows = np.array(scalars.info_rows, np.int64)
        self._per_part = {
            "part": np.array(scalars.part, np.int64),
            "ordinal": np.array(scalars.ordinal, np.int64),
            "episode_ordinal": np.array(scalars.episode_ordinal, np.int64),
            "training_enabled": np.array(scalars.training_enabled, np.bool_),
        }
        # t counts from each part's t0: add t0 minus the part's first row to the row number
        self._shifts = np.array(scalars.t0, np.int64) - self._starts[:-1]

    @property
    def bytes_per_row(self) -> float:
        """Raw bytes of an average row: its buffers, and about 160 bytes for everything else."""
        block = self._block
        values = len(block.obs) + len(block.actions) + len(block.dist_inputs)
        return 160 + (values + len(self._infos.data)) / self.rows

    def table(self, begin: int, end: int) -> pa.Table:
        """Rows `begin`..`end` (exclusive) as a table of `schema`."""
        parts, sizes = self._parts(begin, end)
        columns: dict[str, Any] = {
            name: pa.array(np.repeat(values[parts], sizes))
            for name, values in self._per_part.items()
        }
        columns["t"] = pa.array(np.arange(begin, end) + np.repeat(self._shifts[parts], sizes))
        columns |= {name: text.rows(parts, sizes) for name, text in self._texts.items()}
        columns |= self._obs.arrays(begin, end) | self._actions.arrays(begin, end)
        columns |= self._endings(begin, end)
        columns |= self._steps_columns(begin, end)
        here = slice(*np.searchsorted(self._info_rows, (begin, end)).tolist())
        columns["infos"] = sparse_items(
            end - begin,
            self._info_rows[here] - begin,
            Texts(self._infos.offsets[here.start : here.stop + 1], self._infos.data),
            pa.string(),
        )
        return pa.Table.from_arrays(
            [columns[name] for name in self.schema.names], schema=self.schema
        )

    def _parts(self, begin: int, end: int) -> tuple[slice, npt.NDArray[np.int64]]:
        """The parts with rows in `begin`..`end`, and how many rows each of them has there."""
        first = int(np.searchsorted(self._starts, begin, "right")) - 1
        last = int(np.searchsorted(self._starts, end, "left"))
        edges = self._starts[first : last + 1].clip(begin, end)
        return slice(first, last), np.diff(edges)

    def _repeated_texts(self) -> dict[str, RepeatedText]:
        scalars = self._block.scalars
        return {
            name: RepeatedText(values)
            for name, values in (
                ("eps_id", scalars.episode_id),
                ("agent_id", scalars.agent_id),
                ("policy_id", scalars.policy_id),
                ("continues", scalars.continues),
                ("tags", scalars.tags),
            )
        }

    def _endings(self, begin: int, end: int) -> dict[str, pa.Array]:
        """ended, terminateds, truncateds, agents, final_obs: columns set in last rows of parts."""
        rows = end - begin
        parts = slice(*np.searchsorted(self._last_rows, (begin, end)).tolist())
        at = self._last_rows[parts] - begin
        ended = np.full(rows, -1, np.int8)
        ended[at] = self._ended[parts]
        agents = np.full(rows, -1, np.int32)
        agents[at] = self._agents[parts]
        found = slice(*np.searchsorted(self._final_rows, (begin, end)).tolist())
        final = {
            spec.name: sparse_leaf(
                spec, _some(values, found), rows, self._final_rows[found] - begin
            )
            for spec, values in self._final
        }
        return {
            "ended": coded(_ENDINGS, ended),
            "terminateds": pa.array(_TERMINATED[ended]),
            "truncateds": pa.array((ended >= 0) & ~_TERMINATED[ended]),
            "agents": _known(agents),
            **final,
        }

    def _steps_columns(self, begin: int, end: int) -> dict[str, pa.Array]:
        columns = {c.name: self._number(c, begin, end) for c in STEP_COLUMNS}
        offsets, data = self._dist
        here = offsets[begin : end + 1]
        columns["action_dist_inputs"] = (
            items_array(DIST_INPUTS.arrow_type, here, data, np.diff(here) > 0)
            if len(data)
            else pa.nulls(end - begin, DIST_INPUTS.arrow_type)
        )
        return columns

    def _number(self, column: StepColumn, begin: int, end: int) -> pa.Array:
        values = self._numbers.get(column.name)
        if values is None:
            return pa.nulls(end - begin, pa.from_numpy_dtype(np.dtype(column.dtype)))
        here = values[begin:end]
        if column.words:
            return coded(_WORDS[column.name], here)
        if not column.nullable:
            return pa.array(here)
        return pa.array(here, mask=np.isnan(here) if column.is_real else here == column.default)


class _BlockValues:
    """The observations or the actions of a block: raw encodings, split into leaves on demand."""

    def __init__(
        self, what: str, specs: tuple[ColumnSpec, ...], space: Any, rows: int, block: PartBlock
    ) -> None:
        self.splitter = RecordSplitter(space)
        self._specs = specs
        raw = getattr(block, what)
        self._starts = self.splitter.offsets(rows, raw, getattr(block, f"{what}_lengths"), what)
        self._data = np.frombuffer(raw, np.uint8)

    def arrays(self, begin: int, end: int) -> dict[str, pa.Array]:
        values = self.splitter.split(self._data, self._starts[begin : end + 1])
        return {
            spec.name: leaf_array(spec, value)
            for spec, value in zip(self._specs, values, strict=True)
        }


def _final_columns(
    block: PartBlock, splitter: RecordSplitter, specs: tuple[ColumnSpec, ...]
) -> list[tuple[ColumnSpec, LeafValues]]:
    """The final observations that exist, by column."""
    found = [data for data in block.scalars.final_obs if data is not None]
    joined = b"".join(found)
    lengths = np.array([len(data) for data in found], "<u4")
    starts = splitter.offsets(len(found), joined, lengths.tobytes(), "final_obs")
    values = splitter.split(np.frombuffer(joined, np.uint8), starts)
    return list(zip(specs, values, strict=True))


def _some(values: LeafValues, rows: slice) -> LeafValues:
    if isinstance(values, Texts):
        return Texts(values.offsets[rows.start : rows.stop + 1], values.data)
    return values[rows]


def _known(values: npt.NDArray[Any]) -> pa.Array:
    """Integers (N,), null where below 0."""
    return pa.array(values, mask=values < 0)


def _dist_inputs(block: PartBlock, rows: int) -> tuple[npt.NDArray[np.int64], Any]:
    lengths = _buffer("dist_lengths", block.dist_lengths or bytes(4 * rows), "<u4", rows)
    starts = starts_of(lengths)
    if starts[-1] != len(block.dist_inputs):
        raise ShardError(f"dist_inputs: expected {starts[-1]} bytes, got {len(block.dist_inputs)}")
    if (lengths % 4).any():
        raise ShardError("dist_lengths: expected multiples of 4 bytes, got others")
    return starts // 4, np.frombuffer(block.dist_inputs, "<f4")


def _buffer(name: str, data: bytes, dtype: str, rows: int) -> npt.NDArray[Any]:
    values = np.frombuffer(data, dtype)
    if len(values) != rows:
        raise ShardError(f"{name}: expected {rows} values, got {len(values)}")
    return values
