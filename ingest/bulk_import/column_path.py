"""The quick way through a bulk import: whole episodes whose steps stay columns.

`runs_of` answers the episodes of a table as `Runs`, or None where anything asks for a closer look:
a space of several leaves, a policy that redacts or whose steps take late rewards, an info, a value
that is null or refused. Then `bulk_columns` takes the table row by row, and says what is wrong and
where.

Every column is checked as a whole, once, and copied out of the request's body once. No Python
object is made per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingest.bulk_import.arrow_stream import MAX_ROWS, is_list, load_arrow
from ingest.bulk_import.row_path import NEEDED, OPTIONAL, WHOLE_ROWS
from ingest.episodes.open_episode import PolicyRules
from ingest.protocol import messages as wire
from storage.experience.episode import LOGP_TOLERANCE
from storage.spaces.codec import Codec

Array = NDArray[Any]

_WANTED = NEEDED | {"obs", "actions"}
_TAKEN = (OPTIONAL - {"infos", "source", "agent_id"}) | _WANTED
PIECE = 5_000  # values, some milliseconds
_WIDEST = 2**53
_LATEST = 2**62


class TooManyEpisodes(Exception):
    """More of them than were asked for."""


class _CloserLook(Exception):
    """Something that is for the way row by row."""


@dataclass(frozen=True, slots=True)
class Run:
    """A whole episode: its number in the table, its rows [begin, end), its start, its Ending."""

    number: int
    begin: int
    end: int
    start: wire.Start
    how: str

    @property
    def steps(self) -> int:
        return self.end - self.begin

    @property
    def events(self) -> int:
        """What it counts for in a reply: the start, the steps, the end."""
        return self.steps + 2


@dataclass(frozen=True, slots=True)
class Runs:
    """The episodes of a table, and the columns of `events.Imported` over all of its rows."""

    episodes: list[Run]
    rows: int
    columns: Mapping[str, bytes]

    @property
    def count(self) -> int:
        """How many episodes there are."""
        return len(self.episodes)

    def bounds(self, number: int) -> tuple[int, int]:
        """The rows [begin, end) of an episode."""
        run = self.episodes[number]
        return run.begin, run.end

    def name(self, number: int) -> str:
        """The id of an episode."""
        return self.episodes[number].start.episode_id

    def long(self) -> list[int]:
        """The numbers of the episodes that would come in pieces on the way row by row."""
        return [run.number for run in self.episodes if run.steps > WHOLE_ROWS]

    def columns_of(self, some: Sequence[Run]) -> dict[str, bytes]:
        """The columns over the rows of some of the episodes only, in their order."""
        spans = list(_spans(some))
        return {
            name: _cut(data, len(data) // self.rows, spans) for name, data in self.columns.items()
        }


def _spans(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """The rows of the runs, as few ranges [begin, end)."""
    begin, end = runs[0].begin, runs[0].begin
    for run in runs:
        if run.begin != end:
            yield begin, end
            begin = run.begin
        end = run.end
    yield begin, end


def _cut(data: bytes, size: int, spans: list[tuple[int, int]]) -> bytes:
    pieces = [data[size * begin : size * end] for begin, end in spans]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def runs_of(
    table: Any,
    rules: PolicyRules,
    *,
    numbered: bool,
    edges: Sequence[int] = (0,),
    most: int = MAX_ROWS,
) -> Runs | None:
    """The episodes of a pyarrow.Table that has been validated, or None if not for this way.

    `edges`: rows at which an episode begins in any case, the first row among them. Raises
    TooManyEpisodes, early, for more than `most`.
    """
    names, policy = table.column_names, rules.declaration
    fits = len(set(names)) == len(names) and _WANTED <= set(names) <= _TAKEN
    late = policy.redact or policy.reward_window > 0
    if not (fits and _is_lone(rules.observation) and _is_lone(rules.action)) or late:
        return None
    batches = table.combine_chunks().to_batches()  # one, unless it has no rows or gigabytes
    try:
        _require(len(batches) == 1)
        return _Columns(names, batches[0], rules).runs(edges, numbered=numbered, most=most)
    except _CloserLook:
        return None


def _is_lone(codec: Codec) -> bool:
    """Whether a space is one array, and no dictionary or tuple with one in it."""
    return len(codec.leaves) == 1 and not codec.leaves[0].path


class _Columns:
    """A batch's columns, checked as wholes. Raises _CloserLook for what is not plain and valid."""

    def __init__(self, names: Sequence[str], batch: Any, rules: PolicyRules) -> None:
        """`batch` is a pyarrow.RecordBatch of one row or more; no name comes twice."""
        self._arrow, self._compute = load_arrow()
        self._columns = dict(zip(names, batch.columns, strict=True))
        self._rows: int = batch.num_rows
        self._rules = rules

    def runs(self, edges: Sequence[int], *, numbered: bool, most: int) -> Runs:
        begins, ends, names = self._bounds(edges, most)
        ts = self._times()
        columns = {
            "obs": self._canonical("obs", self._rules.observation),
            "actions": self._canonical("actions", self._rules.action),
            "rewards": self._rewards(),
            "logp": self._propensities(),
            "versions": self._versions(),
            "pass_prob": self._pass_probs(),
            "ts": b"" if ts is None else ts.tobytes(),
        }
        firsts = [None] * len(names) if ts is None else ts[begins].tolist()
        starts = self._starts(begins, names, firsts, numbered=numbered)
        places = zip(begins.tolist(), ends.tolist(), starts, self._endings(ends - 1), strict=True)
        return Runs([Run(n, *place) for n, place in enumerate(places)], self._rows, columns)

    # --- steps ---------------------------------------------------------------------------

    def _canonical(self, name: str, codec: Codec) -> bytes:
        """The values as the codec encodes them, all of them valid."""
        column, leaf = self._plain(name), codec.leaves[0]
        if self._arrow.types.is_fixed_size_list(column.type):
            column = column.flatten()
        _require(not is_list(column.type))  # of which objects would be made
        _require(column.null_count == 0 and codec.itemsize is not None)
        values: Array = column.to_numpy(zero_copy_only=False)
        _require(values.dtype == leaf.dtype)
        _require(values.nbytes == self._rows * (codec.itemsize or 0))
        data = values.tobytes()
        _require(codec.find_invalid(data, self._rows) is None)
        return data

    def _plain(self, name: str) -> Any:
        column = self._columns[name]
        _require(column.null_count == 0)
        return column

    def _numbers(self, name: str, dtype: type[np.generic]) -> Array | None:
        """A column of numbers, None when there is none."""
        if name not in self._columns:
            return None
        values: Array = self._plain(name).to_numpy(zero_copy_only=False)
        _require(values.dtype == dtype)
        return values

    def _rewards(self) -> bytes:
        values: Array = self._plain("rewards").to_numpy(zero_copy_only=False)
        _require(values.dtype in (np.float64, np.float32) and np.isfinite(values).all())
        return values.astype(np.float64, copy=False).tobytes()

    def _propensities(self) -> bytes:
        values = self._numbers("action_logp", np.float64)
        if values is None:
            return b""
        most = np.inf if self._rules.has_densities else LOGP_TOLERANCE
        _require(np.isfinite(values).all() and (values <= most).all())
        return values.tobytes()

    def _versions(self) -> bytes:
        values = self._numbers("policy_version", np.int64)
        if values is None:
            return b""
        _require(values.min() >= -1 and values.max() <= _WIDEST)
        return values.tobytes()

    def _pass_probs(self) -> bytes:
        values = self._numbers("pass_prob", np.float64)
        if values is None:
            return b""
        _require(((values > 0.0) & (values <= 1.0)).all())
        return values.tobytes()

    def _times(self) -> Array | None:
        values = self._numbers("ts", np.int64)
        _require(values is None or (values.min() > -_LATEST and values.max() < _LATEST))
        return values

    # --- episodes ------------------------------------------------------------------------

    def _bounds(self, edges: Sequence[int], most: int) -> tuple[Array, Array, list[str]]:
        """Where each episode begins and ends, and its id.

        Its rows are in one place, dense from t = 0, and make one part.
        """
        ids = self._plain("eps_id")
        differs = self._compute.not_equal(ids.slice(1), ids.slice(0, self._rows - 1))
        changes = differs.to_numpy(zero_copy_only=False).nonzero()[0] + 1
        begins = np.union1d(edges, changes).astype(np.int64)
        if len(begins) > most:
            raise TooManyEpisodes
        ends = np.append(begins[1:], self._rows)
        names: list[str] = _listed(ids.take(self._arrow.array(begins)))
        # no id in two places; `set` would hold the interpreter for all of them at once
        _require(len({name for name in names}) == len(names))  # noqa: C416
        _require(all(type(name) is str and 0 < len(name) <= 256 for name in names))
        longest, policy = int((ends - begins).max()), self._rules.declaration
        size = (self._rules.observation.itemsize or 0) + (self._rules.action.itemsize or 0) + 128
        _require(longest <= policy.part_steps and longest * size <= policy.part_bytes)
        t = self._numbers("t", np.int64)
        if t is not None:
            _require((t == np.arange(self._rows) - np.repeat(begins, ends - begins)).all())
        return begins, ends, names

    def _starts(
        self, begins: Array, names: list[str], ts: list[Any], *, numbered: bool
    ) -> list[wire.Start]:
        enabled = self._cells("training_enabled", begins, bool, True)
        continues = self._cells("continues", begins, str, None)
        tags = self._cells("tags", begins, str, None)
        return [
            wire.Start(
                episode_id=name,
                start=number if numbered else None,
                policy_id=self._rules.declaration.policy_id,
                training_enabled=enabled[number],
                tags=_tags(tags[number]),
                continues=continues[number],
                ts=ts[number],
            )
            for number, name in enumerate(names)
        ]

    def _endings(self, lasts: Array) -> list[str]:
        """How each episode ended, by its last row: what is not said to be truncated is over."""
        ended = self._cells("ended", lasts, str, "terminated")
        cut = self._cells("truncateds", lasts, bool, None)
        return [
            "truncated" if (word != "terminated" if flag is None else flag) else "terminated"
            for word, flag in zip(ended, cut, strict=True)
        ]

    def _cells(self, name: str, rows: Array, kind: type, default: Any) -> list[Any]:
        """A column's values in some rows, the default for null and where there is no column."""
        if name not in self._columns:
            return [default] * len(rows)
        values = _listed(self._columns[name].take(self._arrow.array(rows)))
        _require(all(value is None or type(value) is kind for value in values))
        return [default if value is None else value for value in values]


def _listed(values: Any) -> list[Any]:
    """A pyarrow.Array as a list, a piece at a time: Arrow holds the interpreter for each."""
    pieces = (values.slice(at, PIECE) for at in range(0, len(values), PIECE))
    return [value for piece in pieces for value in piece.to_pylist()]


def _tags(text: str | None) -> dict[str, str] | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise _CloserLook from error


def _require(fine: Any) -> None:
    if not fine:
        raise _CloserLook
