"""The quick way through a bulk import: whole episodes whose steps stay columns.

`runs_of` answers the episodes of a table as `Run`s, or None where anything asks for a closer look:
a space of several leaves, a policy that redacts, an info, a value that is null or refused. Then
`bulk_columns` takes the table row by row, and says what is wrong and where.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingest import wire
from ingest.bulk_columns import NEEDED, OPTIONAL
from ingest.judgements import LOGP_TOLERANCE
from ingest.open_episode import PolicyRules
from storage.codec import Codec

Array = NDArray[Any]

_TAKEN = (OPTIONAL - {"infos", "source", "agent_id"}) | NEEDED | {"obs", "actions"}
_WIDEST = 2**53


class _CloserLook(Exception):
    """Something that is for the way row by row."""


@dataclass(frozen=True)
class Run:
    """A whole episode: its start, its steps as columns of canonical bytes, its end."""

    number: int
    begin: int  # its first row
    start: wire.Start
    steps: int
    obs: bytes
    actions: bytes
    rewards: bytes  # float64
    logp: bytes  # float64, NaN where unknown
    versions: bytes  # int64
    pass_prob: bytes  # float64
    ts: bytes  # int64 microseconds; empty: when it was received
    end: wire.End

    @property
    def events(self) -> int:
        """What it counts for in a reply: the start, the steps, the end."""
        return self.steps + 2


def runs_of(table: Any, rules: PolicyRules, *, numbered: bool) -> list[Run] | None:
    """The episodes of a pyarrow.Table, or None if it is not for this way."""
    names = set(table.column_names)
    lone = all(
        len(c.leaves) == 1 and not c.leaves[0].path for c in (rules.observation, rules.action)
    )
    fits = len(names) == table.num_columns and NEEDED | {"obs", "actions"} <= names <= _TAKEN
    if not (lone and fits and table.num_rows) or rules.declaration.redact:
        return None
    try:
        columns = _Columns(table.combine_chunks(), rules)
        return [columns.run(*found, numbered=numbered) for found in enumerate(columns.bounds())]
    except _CloserLook:
        return None


class _Columns:
    """A table's columns, checked as wholes. Raises _CloserLook for what is not plain and valid."""

    def __init__(self, table: Any, rules: PolicyRules) -> None:
        self._table = table
        self._rules = rules
        self._obs = self._canonical("obs", rules.observation)
        self._actions = self._canonical("actions", rules.action)
        self._rewards = self._floats("rewards", 0.0)
        _require(np.isfinite(self._rewards).all())
        self._logp = self._propensities()
        self._versions = self._whole("policy_version", -1)
        _require(((self._versions >= -1) & (self._versions <= _WIDEST)).all())
        self._pass_prob = self._floats("pass_prob", 1.0)
        _require(((self._pass_prob > 0.0) & (self._pass_prob <= 1.0)).all())
        self._ts = self._whole("ts", 0) if "ts" in table.column_names else None

    def _canonical(self, name: str, codec: Codec) -> bytes:
        """The values as the codec encodes them, all of them valid."""
        column, leaf = self._plain(name), codec.leaves[0]
        arrow = importlib.import_module("pyarrow")
        if arrow.types.is_fixed_size_list(column.type):
            column = column.flatten()
        primitive = arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)
        _require(primitive and column.null_count == 0 and codec.itemsize is not None)
        values: Array = column.to_numpy(zero_copy_only=False)
        rows = self._table.num_rows
        _require(values.dtype == leaf.dtype and values.nbytes == rows * (codec.itemsize or 0))
        data = values.tobytes()
        _require(codec.find_invalid(data, rows) is None)
        return data

    def _plain(self, name: str) -> Any:
        column = self._table[name].combine_chunks()
        chunks = getattr(column, "chunks", None)  # of an empty or a single chunk, by version
        if chunks is not None:
            _require(len(chunks) == 1)
            column = chunks[0]
        _require(column.null_count == 0)
        return column

    def _floats(self, name: str, default: float) -> Array:
        if name not in self._table.column_names:
            return np.full(self._table.num_rows, default)
        values: Array = self._plain(name).to_numpy(zero_copy_only=False)
        _require(values.dtype == np.float64)
        return values

    def _whole(self, name: str, default: int) -> Array:
        if name not in self._table.column_names:
            return np.full(self._table.num_rows, default, np.int64)
        values: Array = self._plain(name).to_numpy(zero_copy_only=False)
        _require(values.dtype == np.int64 and (np.abs(values) < 2**62).all())
        return values

    def _propensities(self) -> Array:
        values = self._floats("action_logp", np.nan)
        if "action_logp" in self._table.column_names:
            _require(np.isfinite(values).all())
            most = np.inf if self._rules.has_densities else LOGP_TOLERANCE
            _require((values <= most).all())
        return values

    def bounds(self) -> list[tuple[int, int]]:
        """[begin, end) of each episode: rows in one place, dense from t = 0, of one part."""
        codes = self._plain("eps_id").dictionary_encode()
        indices: Array = codes.indices.to_numpy(zero_copy_only=False)
        edges = np.flatnonzero(np.diff(indices)) + 1
        ends = [*edges.tolist(), len(indices)]
        found = list(zip([0, *ends[:-1]], ends, strict=True))
        self._names: list[str] = codes.dictionary.to_pylist()  # as they appear
        _require(len(found) == len(self._names))  # an id in two places has two runs
        _require(all(type(name) is str and 0 < len(name) <= 256 for name in self._names))
        lengths = np.diff([0, *ends])
        policy = self._rules.declaration
        size = (self._rules.observation.itemsize or 0) + (self._rules.action.itemsize or 0) + 128
        _require(lengths.max() <= policy.part_steps)
        _require(lengths.max() * size <= policy.part_bytes)
        if "t" in self._table.column_names:
            expected = np.arange(len(indices)) - np.repeat([begin for begin, _ in found], lengths)
            _require((self._whole("t", 0) == expected).all())
        return found

    def run(self, number: int, bounds: tuple[int, int], *, numbered: bool) -> Run:
        """The episode of those rows."""
        begin, end = bounds
        steps, last = end - begin, end - 1
        obs, action = self._rules.observation.itemsize or 0, self._rules.action.itemsize or 0
        name = self._names[number]
        ended = self._cell("ended", last, str, "terminated")
        truncated = self._cell("truncateds", last, bool, ended != "terminated")
        return Run(
            number=number,
            begin=begin,
            start=wire.Start(
                episode_id=name,
                start=number if numbered else None,
                policy_id=self._rules.declaration.policy_id,
                training_enabled=self._cell("training_enabled", begin, bool, True),
                tags=self._tags(begin),
                continues=self._cell("continues", begin, str, None),
                ts=None if self._ts is None else int(self._ts[begin]),
            ),
            steps=steps,
            obs=self._obs[begin * obs : end * obs],
            actions=self._actions[begin * action : end * action],
            rewards=self._rewards[begin:end].tobytes(),
            logp=self._logp[begin:end].tobytes(),
            versions=self._versions[begin:end].tobytes(),
            pass_prob=self._pass_prob[begin:end].tobytes(),
            ts=b"" if self._ts is None else self._ts[begin:end].tobytes(),
            end=wire.End(episode_id=name, seq=steps + 1 if numbered else None, truncated=truncated),
        )

    def _cell(self, name: str, row: int, kind: type, default: Any = None) -> Any:
        if name not in self._table.column_names:
            return default
        value = self._table[name][row].as_py()
        _require(value is None or type(value) is kind)
        return default if value is None else value

    def _tags(self, row: int) -> dict[str, str] | None:
        text = self._cell("tags", row, str)
        if not text:
            return None
        try:
            return msgspec.json.decode(text, type=dict[str, str])
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
            raise _CloserLook from error


def _require(fine: Any) -> None:
    if not fine:
        raise _CloserLook
