"""The rows of a bulk import as episodes whose steps are columns, a block of rows at a time.

`StepColumns` checks a table's columns and finds its episodes; `block` casts, checks and encodes the
columns of some rows. Invalid rows are found with masks (`RowFaults`): an episode keeps the steps
before its first fault, and is dropped if its first row is invalid. A block may be made in a thread,
because it accesses nothing of the collector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ingest.bulk_import.forms import Form
from ingest.bulk_import.import_reply import NAMED
from ingest.bulk_import.runs import UNFIT, runs_of
from ingest.columns.arrow_kinds import Array, Mask, load_arrow, nulls, one_array, to_numpy
from ingest.columns.faults import Fault, Got, RowFaults, nothing, shown
from ingest.columns.leaf_columns import encode
from ingest.columns.step_numbers import unfit
from ingest.episodes.event_checks import info_text
from ingest.episodes.journal_events import NO_TIME
from ingest.episodes.redaction import Redaction
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.experience.endings import ENDINGS, OBSERVED
from storage.experience.episode import DEFAULT_AGENT
from storage.experience.step_columns import STEP_COLUMNS, StepColumn
from storage.spaces.action_mask import ACTION_MASK
from storage.spaces.descriptors import SpaceError

BLOCK_ROWS, BLOCK_BYTES = 20_000, 4_000_000
"""The most rows and bytes of a block; an episode with more rows comes in pieces."""

_GIVEN = tuple(column for column in STEP_COLUMNS if column.in_bulk and column.name != "env_t")
_ENV_T = next(column for column in STEP_COLUMNS if column.name == "env_t")
_AGENTS = StepColumn(name="agents", dtype="<i8", default=-1, low=-1, high=2**31 - 1)
_ENDS = ("ended", "terminateds", "truncateds")
"""The columns of an episode's last row that give its ending."""


@dataclass(slots=True)
class Run:
    """An episode, or a piece of a long one: its number in the table, its good rows [begin, end).

    `rows` is the number of all its rows. `how` is its Ending, "" if another piece follows.
    """

    number: int
    begin: int
    end: int
    rows: int
    start: wire.Start
    how: str
    t0: int = 0
    final_obs: bytes | None = None
    agents: int = -1  # the number of tracks of the whole episode
    bad: int | None = None  # the row that broke it
    cause: str = ""

    @property
    def steps(self) -> int:
        return self.end - self.begin

    @property
    def events(self) -> int:
        """The events that its good steps count for in a reply: the start, the steps, the end."""
        return 1 + self.t0 + self.steps + (self.bad is None)

    @property
    def all_events(self) -> int:
        return self.rows + 2


@dataclass(slots=True)
class BlockRuns:
    """The runs of a block as columns: one value per run. Those that are `plain` need no object.

    `begins` and `ends` are the good rows in the table, `rows` counts all rows, `t0` those before
    the block. `bad`: the row that broke a run, or -1. Plain runs are whole episodes, or tracks,
    without faults and reward windows. A list is empty if no run differs from the default.
    """

    numbers: Array
    begins: Array
    ends: Array
    rows: Array
    t0: Array
    bad: Array
    plain: Array
    times: Array
    names: list[str]
    how: list[str]
    tags: list[dict[str, str] | None]
    continues: list[str | None]
    enabled: list[bool]
    finals: list[bytes | None]
    agent_ids: list[str]
    agents: list[int]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> Array:
        return np.asarray(self.ends - self.begins)

    def take(self, places: Array | slice) -> BlockRuns:
        """Some of the runs."""

        def some(values: Any) -> Any:
            if isinstance(values, np.ndarray) or isinstance(places, slice) or not values:
                return values[places] if len(values) else values
            return [values[place] for place in places.tolist()]

        return BlockRuns(*(some(getattr(self, name)) for name in BlockRuns.__slots__))


@dataclass(slots=True)
class StepBlock:
    """The rows [begin, end) of a table: its episodes, and the columns of `Imported` over them.

    `runs` are those with a good step; `refused`: (number, rows, first bad row) of the others. Their
    starts have numbers if the import is `numbered`.
    """

    begin: int
    end: int
    policy_id: str
    numbered: bool
    columns: dict[str, bytes]
    infos: dict[int, str]
    part_steps: int
    faults: RowFaults
    ends: RowFaults  # of final observations and endings
    runs: BlockRuns = field(init=False)
    refused: list[tuple[int, int, int]] = field(default_factory=list)
    causes: int = 0

    def run(self, runs: BlockRuns, at: int) -> Run:
        """One of some runs of the block, as an object."""
        number, begin, t0 = int(runs.numbers[at]), int(runs.begins[at]), int(runs.t0[at])
        bad, how = int(runs.bad[at]), runs.how[at]
        ts = int(runs.times[at]) if len(runs.times) else NO_TIME
        start = wire.Start(
            episode_id=runs.names[at],
            agent_id=runs.agent_ids[at] if runs.agent_ids else None,
            start=number if self.numbered else None,
            policy_id=self.policy_id,
            training_enabled=runs.enabled[at] if runs.enabled else True,
            tags=runs.tags[at] if runs.tags else None,
            continues=runs.continues[at] if runs.continues else None,
            ts=None if ts == NO_TIME else ts,
        )
        run = Run(number, begin, int(runs.ends[at]), int(runs.rows[at]), start, how, t0)
        run.final_obs = runs.finals[at] if runs.finals else None
        run.agents = runs.agents[at] if runs.agents else -1
        if bad >= 0:
            run.bad, run.cause = bad, self.cause(bad)
        elif how == "broken":
            run.cause = "it was imported as broken"
        return run

    def columns_of(self, some: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """The columns of only the rows [begin, end) of some episodes, in order."""
        spans = list(self._spans(some))
        rows, found = self.end - self.begin, dict[str, Any]()
        for name in ("obs", "actions"):
            data, lengths = self.columns[name], self.columns[f"{name}_lengths"]
            if not lengths:
                found[name] = _cut(data, len(data) // rows, spans)
                continue
            ends = np.append(0, np.cumsum(np.frombuffer(lengths, np.uint32), dtype=np.int64))
            found[name] = _cut(data, 1, [(int(ends[a]), int(ends[b])) for a, b in spans])
        for name, data in self.columns.items():
            if name not in found:
                found[name] = _cut(data, len(data) // rows, spans)
        if self.infos:
            found["infos"], at = {}, 0
            for begin, end in spans:
                for row in range(begin, end):
                    if row in self.infos:
                        found["infos"][at + row - begin] = self.infos[row]
                at += end - begin
        return found

    def _spans(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The rows of runs in the block, merged into ranges [begin, end)."""
        begin = end = -1
        for first, last in runs:
            if first - self.begin != end:
                if end > begin:
                    yield begin, end
                begin = first - self.begin
            end = last - self.begin
        if end > begin:
            yield begin, end

    def sums(self) -> Iterator[tuple[str, int]]:
        """The number of invalid rows, by column and reason."""
        for fault, rows in (*self.faults.each(), *self.ends.each()):
            yield fault.reason[:200], len(rows)

    def cause(self, row: int) -> str:
        """Why an episode broke; only the first causes show the value found."""
        self.causes += 1
        fault = self._of(row)
        return fault.expected if self.causes > NAMED else fault.message(row - self.begin)

    def error(self, row: int, name: str) -> dict[str, Any]:
        """The error of an invalid row of the table, as a reply contains it."""
        fault = self._of(row)
        message, path = fault.message(row - self.begin), f"$.{fault.place}[{row}]"
        text = f"Episode {name}: {message}" if name else message
        return dict(Refusal("invalid", text, path, name or None).to_json())

    def _of(self, row: int) -> Fault:
        at = row - self.begin
        return (self.faults if self.faults.has(at) else self.ends).of(at)


def _cut(data: bytes, size: int, spans: list[tuple[int, int]]) -> bytes:
    if len(spans) == 1:
        begin, end = spans[0]
        return data[size * begin : size * end]
    return b"".join([data[size * begin : size * end] for begin, end in spans])


class StepColumns:
    """A table with valid columns: its episodes, and the contents of its rows by block."""

    def __init__(
        self, table: Any, form: Form, redaction: Redaction | None, *, numbered: bool
    ) -> None:
        """`table` is a validated pyarrow.Table or RecordBatch of that form.

        Starts are `numbered` if the import may be repeated. Raises Refusal for several agents, and
        for unknown words in `ended`.
        """
        if not form.has_tracks:
            _require_one_agent(table)
        _require_endings(table, OBSERVED if form.has_tracks else ENDINGS)
        self._arrow = load_arrow()
        self.rules, self._form = form.rules, form
        self._redaction, self._numbered = redaction, numbered
        self.rows: int = table.num_rows
        columns = table.columns
        self._columns = {name: one_array(columns[at]) for name, at in form.read.items()}
        codecs = (form.rules.observation, form.rules.action)
        size = max(table.nbytes // max(1, self.rows), *(codec.itemsize or 0 for codec in codecs))
        self.row_bytes = size + 49  # the approximate size of a step's columns
        self._wide = max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, size)))
        ids, agents = self._columns["eps_id"], None
        if form.has_tracks:
            agents = self._columns["agent_id"]
        self._runs = runs_of(ids, agents, self.rows)
        self.begins = self._runs.begins
        self.ends = np.append(self.begins[1:], self.rows) if self.rows else self.begins

    @property
    def is_slow(self) -> bool:
        """Whether Python code runs for each row."""
        return self._form.is_slow

    @property
    def count(self) -> int:
        """The number of episodes."""
        return len(self.begins)

    def name(self, number: int) -> str:
        """The id of an episode, as sent."""
        return self._runs.names[number]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the blocks [begin, end): rows of some episodes, or a piece of a long one."""
        begin = 0
        while begin < self.rows:
            number = int(self.begins.searchsorted(begin, "right")) - 1
            if self.ends[number] - begin > self._wide or begin > self.begins[number]:
                end = min(begin + self._piece, int(self.ends[number]))
            else:
                last = int(self.ends.searchsorted(begin + self._wide, "right")) - 1
                end = int(self.ends[last])
            yield begin, end
            begin = end

    def is_piece(self, begin: int, end: int) -> bool:
        """Whether a block is a piece of a longer episode."""
        number = int(self.begins.searchsorted(begin, "right")) - 1
        return bool(begin > self.begins[number] or end < self.ends[number])

    @property
    def _piece(self) -> int:
        """The rows of a piece of a long episode: a multiple of a part's rows, if possible."""
        steps: int = min(self.rules.declaration.part_steps, self._wide)
        whole: int = self._wide // steps * steps
        return whole

    # --- a block ---------------------------------------------------------------------------

    def block(self, begin: int, end: int) -> StepBlock:
        """Return the block of the rows [begin, end), one of `blocks`."""
        faults = RowFaults(end - begin)
        first, after = self.begins.searchsorted((begin, end - 1), "right").tolist()
        numbers = np.arange(first - 1, after)
        starts = self.begins[numbers]
        cut = self._columns
        if end - begin < self.rows:
            cut = {name: column.slice(begin, end - begin) for name, column in cut.items()}
        heads = np.maximum(starts, begin) - begin
        self._check_ids(faults, cut, numbers, heads)
        self._check_t(faults, cut, begin, end, numbers)
        self._check_early_ends(faults, cut, self.ends[numbers] - 1 - begin)
        obs, obs_lengths = self._values("obs", cut, faults)
        actions, action_lengths = self._values("actions", cut, faults)
        self._check_masks(faults, obs, obs_lengths, actions)
        columns = {
            "obs": obs,
            "actions": actions,
            "obs_lengths": obs_lengths,
            "actions_lengths": action_lengths,
            **{c.name: self._numbers(c, cut, faults) for c in _GIVEN},
            "env_t": self._env_t(faults, cut, begin, numbers),
        }
        self._numbers(_AGENTS, cut, faults)
        tags = self._check_tags(faults, cut, heads[starts >= begin])
        self._check_continues(faults, cut, heads)
        infos = self._infos(faults, cut)
        ends = RowFaults(end - begin)
        policy = self.rules.declaration
        size = (len(obs) + len(actions)) // (end - begin) + 74  # as for open episodes
        steps = max(1, min(policy.part_steps, policy.part_bytes // size))
        named = policy.policy_id, self._numbered
        block = StepBlock(begin, end, *named, columns, infos, steps, faults, ends)
        self._fill(block, numbers, cut, tags)
        return block

    def _fill(
        self, block: StepBlock, numbers: Array, cut: Mapping[str, Any], tags: dict[int, Any]
    ) -> None:
        """Create a block's runs from its rows."""
        begin, end, count = block.begin, block.end, len(numbers)
        begins, ends = self.begins[numbers], self.ends[numbers]
        heads, tails = np.maximum(begins, begin), np.minimum(ends, end)
        faulty = block.faults.rows + begin
        first_bad = np.append(faulty, end)[faulty.searchsorted(heads)]
        good = np.minimum(first_bad, tails)
        lasts = np.flatnonzero((good == ends) & (good > begins))
        finals = _scattered(
            self._final_values(block, cut, ends[lasts] - 1 - begin), lasts, count, None
        )
        how = _scattered(self._endings(block, cut, ends[lasts] - 1 - begin), lasts, count, "")
        bad = np.where(good < tails, good, -1)
        ended_badly = lasts[block.ends.bad[ends[lasts] - 1 - begin]]
        bad[ended_badly] = ends[ended_badly] - 1
        for at in np.flatnonzero(bad >= 0).tolist():
            how[at], finals[at] = "broken", None
        enabled = self._cells("training_enabled", cut, heads - begin, True)
        continues = self._cells("continues", cut, heads - begin, None)
        times = np.frombuffer(block.columns["ts"], np.int64)
        plain = np.full(count, not self.rules.declaration.reward_window)
        if not {*how} <= {*OBSERVED}:
            plain &= [word in OBSERVED for word in how]
        plain &= heads == begins
        first, last = int(numbers[0]), int(numbers[-1]) + 1
        agents, agent_ids = list[int](), list[str]()
        if self._runs.agents is not None:
            agent_ids = self._runs.agents[first:last]
            given = self._cells("agents", cut, tails - 1 - begin, -1)
            ended = (word in OBSERVED for word in how)
            agents = [n if n > 0 and ends else -1 for n, ends in zip(given, ended, strict=True)]
        runs = BlockRuns(
            numbers, heads, good, ends - begins, heads - begins, bad, plain,
            times[heads - begin] if len(times) else times,
            self._runs.names[first:last],
            how,
            [tags.get(head) for head in (heads - begin).tolist()] if tags else [],
            continues if any(continues) else [],
            enabled if not all(enabled) else [],
            finals if any(final is not None for final in finals) else [],
            agent_ids,
            agents,
        )  # fmt: skip
        none = (good < tails) & (good == begins)
        if none.any():
            places = zip(numbers[none], runs.rows[none], good[none], strict=True)
            block.refused += [(int(number), int(rows), int(row)) for number, rows, row in places]
            runs = runs.take(np.flatnonzero(~none))
        block.runs = runs

    # --- columns ---------------------------------------------------------------------------

    def _check_ids(
        self, faults: RowFaults, cut: Mapping[str, Any], numbers: Array, heads: Array
    ) -> None:
        """Record a fault in the first row of each episode with an invalid id."""
        if self._runs.faults is None:
            return
        found = self._runs.faults[numbers]
        for kind in np.unique(found[found > 0]).tolist():
            name, expected = UNFIT[kind]
            rows = np.zeros(len(faults), np.bool_)
            rows[heads[found == kind]] = True
            faults.add(rows, name, expected, shown(cut[name]))

    def _check_t(
        self, faults: RowFaults, cut: Mapping[str, Any], begin: int, end: int, numbers: Array
    ) -> None:
        if "t" not in cut:
            return
        values, absent = _numbers(cut["t"])
        begins, ends = self.begins[numbers], np.minimum(self.ends[numbers], end)
        expected = np.arange(begin, end) - np.repeat(begins, ends - np.maximum(begins, begin))
        bad = (values != expected) & ~absent
        faults.add(bad, "t", "expected t to run from 0 in each episode", lambda row: values[row])

    def _env_t(
        self, faults: RowFaults, cut: Mapping[str, Any], begin: int, numbers: Array
    ) -> bytes:
        """The environment's steps of tracks as int64, empty if episodes have one agent."""
        if not self._form.has_tracks:
            return b""
        values, absent = _numbers(cut["env_t"])
        expected = f"expected {_ENV_T.expected}"
        faults.add(_ENV_T.unfit(values) | absent, "env_t", expected, shown(cut["env_t"]))
        before = values[:1] - 1
        if begin > self.begins[numbers[0]]:  # a piece that is not the first
            before = _numbers(self._columns["env_t"].slice(begin - 1, 1))[0]
        fell = np.diff(values.astype(np.int64), prepend=before.astype(np.int64)) <= 0
        heads = self.begins[numbers] - begin
        fell[heads[heads >= 0]] = False
        expected = "expected a larger number than in the previous step"
        faults.add(fell, "env_t", expected, shown(cut["env_t"]))
        return values.astype(np.int64).tobytes()

    def _values(
        self, prefix: str, cut: Mapping[str, Any], faults: RowFaults
    ) -> tuple[bytes, bytes]:
        """A space's canonical bytes in all rows, and their lengths if these vary."""
        codec = self.rules.action if prefix == "actions" else self.rules.observation
        found = {}
        for leaf in self._form.leaves[prefix]:
            values = leaf.values(cut[leaf.place], faults)
            if self._redaction is not None and prefix != "actions":
                values = self._redaction.column(leaf.leaf, values)
            found[leaf.leaf.path] = values
        return encode(codec, found, len(faults))

    def _check_masks(self, faults: RowFaults, obs: bytes, lengths: bytes, actions: bytes) -> None:
        """Record a fault in each row whose action mask forbids the action."""
        mask, rules = self.rules.action_mask, self.rules
        if mask is None:
            return
        sizes = np.frombuffer(lengths, np.uint32).tolist() if lengths else None
        seen = rules.observation.columns(obs, len(faults), sizes)
        taken = rules.action.columns(actions, len(faults))[mask.choices.path]
        bad = mask.forbidden(seen, taken)
        faults.add(bad, "actions", f"expected an action that obs.{ACTION_MASK} allows", taken.item)

    def _final_values(
        self, block: StepBlock, cut: Mapping[str, Any], rows: Array
    ) -> list[bytes | None]:
        """The final observations of some rows of the block, None if absent."""
        if not self._form.has_finals or not len(rows):
            return [None] * len(rows)
        codec = self.rules.observation
        names = [leaf.place for leaf in self._form.leaves["final_obs"]]
        there = np.ones(len(rows), np.bool_)
        taken = {name: cut[name].take(self._arrow.array(rows)) for name in names}
        for column in taken.values():
            if column.null_count:
                there &= ~np.asarray(column.is_null())
        found: list[bytes | None] = [None] * len(rows)
        places = np.flatnonzero(there)
        if not len(places):
            return found
        some = {name: column.take(self._arrow.array(places)) for name, column in taken.items()}
        faults = RowFaults(len(places))
        data, lengths = self._values("final_obs", some, faults)
        sizes = (
            np.frombuffer(lengths, np.uint32) if lengths else [codec.itemsize or 0] * len(places)
        )
        at = 0
        for place, size in zip(places.tolist(), np.asarray(sizes).tolist(), strict=True):
            found[place] = data[at : at + size]
            at += size
        block.ends.take(faults, rows[places])
        return found

    def _numbers(self, column: StepColumn, cut: Mapping[str, Any], faults: RowFaults) -> bytes:
        """A column's values, its default for null; empty if the column is absent."""
        if column.name not in cut:
            return b""
        values, absent = _numbers(cut[column.name])
        if column.is_real:
            values = values.astype(np.float64, copy=False)
        bad, expected = unfit(column, values, self.rules.has_densities)
        if column.is_required:
            faults.add(absent, column.name, expected, nothing)
        faults.add(bad & ~absent, column.name, expected, lambda row: values[row])
        found = values.astype(column.dtype)
        found[absent] = column.default
        return found.tobytes()

    def _infos(self, faults: RowFaults, cut: Mapping[str, Any]) -> dict[int, str]:
        """The infos of a block: row -> JSON object, for rows that have one."""
        if "infos" not in cut:
            return {}
        bad, found = np.zeros(len(faults), np.bool_), dict[int, str]()
        known: dict[Any, str | None] = {None: ""}
        for row, text in enumerate(cut["infos"].to_pylist()):
            if text not in known:
                known = {None: ""} if len(known) > 256 else known
                known[text] = self._info(text)
            info = known[text]
            if info is None:
                bad[row] = True
            elif info:
                found[row] = info
        got = self._shown_json("infos", cut["infos"])
        faults.add(bad, "infos", "expected a JSON object of JSON values", got)
        return found

    def _info(self, text: str | bytes) -> str | None:
        value = json_object(text)
        if value is None:
            return None
        try:
            wire.require_shallow(value)
            return info_text(value if self._redaction is None else self._redaction.info(value))
        except (SpaceError, ValueError):
            return None

    def _shown_json(self, name: str, values: Any) -> Got:
        if name in self._form.hidden:
            return lambda row: "other text, not shown because it is redacted"
        return shown(values)

    def _check_tags(
        self, faults: RowFaults, cut: Mapping[str, Any], heads: Array
    ) -> dict[int, Any]:
        """The tags of episodes by their first rows, for episodes that have any."""
        if "tags" not in cut:
            return {}
        texts = cut["tags"].take(self._arrow.array(heads)).to_pylist()
        known = {text: _tags_of(text) for text in {*texts}}  # often the same in many episodes
        found = [known[text] for text in texts]
        bad = np.zeros(len(faults), np.bool_)
        bad[heads] = [tags is None for tags in found]
        got = self._shown_json("tags", cut["tags"])
        faults.add(bad, "tags", "expected a JSON object of strings", got)
        return {row: tags for row, tags in zip(heads.tolist(), found, strict=True) if tags}

    def _check_continues(self, faults: RowFaults, cut: Mapping[str, Any], heads: Array) -> None:
        if "continues" in cut:
            names = self._cells("continues", cut, heads, None)
            bad = np.zeros(len(faults), np.bool_)
            bad[heads] = [name is not None and not 0 < len(name) <= 256 for name in names]
            expected = "expected an episode id of 1 to 256 characters"
            faults.add(bad, "continues", expected, shown(cut["continues"]))

    def _check_early_ends(self, faults: RowFaults, cut: Mapping[str, Any], lasts: Array) -> None:
        """Record a fault in each row before the last one that says that its episode ended."""
        for name in _ENDS:
            if name in cut:
                column = cut[name]
                early = np.array(column.is_valid() if name == "ended" else column.fill_null(False))
                early[lasts[lasts < len(faults)]] = False
                expected = "expected an end only in the last row of an episode"
                faults.add(early, name, expected, shown(cut[name]))

    def _endings(self, block: StepBlock, cut: Mapping[str, Any], rows: Array) -> list[str]:
        """How the episodes ended whose last rows these are; terminated if no column says.

        Columns that contradict each other are faults.
        """
        there = [name for name in _ENDS if name in cut]
        if not there:
            return ["terminated"] * len(rows)
        taken = self._arrow.array(rows)
        encoded = [cut[name].take(taken).dictionary_encode("encode") for name in there]
        sizes = [len(column.dictionary) for column in encoded]
        codes = np.ravel_multi_index([column.indices.to_numpy() for column in encoded], sizes)
        used = np.unique(codes)
        words = [column.dictionary.to_pylist() for column in encoded]
        known, bad = [""] * math.prod(sizes), np.zeros(len(block.ends), np.bool_)
        for code in used.tolist():
            at = np.unravel_index(code, sizes)
            cells = {name: own[place] for name, own, place in zip(there, words, at, strict=True)}
            known[code] = _ending(*(cells.get(name) for name in _ENDS))
        bad[rows] = ~np.array(known, np.bool_)[codes]
        expected = f"expected one ending from {', '.join(there)}"

        def got(row: int) -> str:
            return ", ".join(f"{cut[name][row].as_py()!r}" for name in there)

        block.ends.add(bad, there[0], expected, got)
        return [known[code] for code in codes.tolist()]

    def _cells(self, name: str, cut: Mapping[str, Any], rows: Array, default: Any) -> list[Any]:
        """A column's values in some rows; the default for null, and if the column is absent."""
        if name not in cut:
            return [default] * len(rows)
        values = cut[name].take(self._arrow.array(rows)).to_pylist()
        return [default if value is None else value for value in values]


def _scattered(values: list[Any], places: Array, count: int, rest: Any) -> list[Any]:
    """A list of `count` values, which are `rest` except at some places."""
    if len(values) == count:
        return values
    found = [rest] * count
    for place, value in zip(places.tolist(), values, strict=True):
        found[place] = value
    return found


def _ending(word: str | None, terminated: bool | None, truncated: bool | None) -> str:
    """The Ending that a last row states, "" if its cells contradict each other."""
    if word is None:
        cut_off = truncated if truncated is not None else terminated is False
        word = "truncated" if cut_off else "terminated"
    ends = word == "terminated"
    return word if terminated in (None, ends) and truncated in (None, not ends) else ""


def _tags_of(text: str | bytes | None) -> dict[str, str] | None:
    """Parse an episode's tags; None for anything but a JSON object of strings or no text."""
    value = json_object(text or "")
    strings = value is not None and all(type(tag) is str for tag in value.values())
    return value if strings else None


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Parse a JSON object; {} for no text, None for anything else."""
    if not text:
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict) else None


def _numbers(column: Any) -> tuple[Array, Mask]:
    """A column's numbers, and which of them are null."""
    filled = column.fill_null(0) if column.null_count else column
    return to_numpy(filled), nulls(column)


def _require_one_agent(table: Any) -> None:
    """Raise Refusal unless all rows have the default agent id."""
    if "agent_id" not in table.schema.names:
        return
    agents = set(table["agent_id"].unique().slice(0, 9).to_pylist()) - {None, DEFAULT_AGENT}
    if agents:
        text = f"expected the agent {DEFAULT_AGENT!r}, got {sorted(map(str, agents))!r:.200}"
        raise Refusal("invalid", text, "$.agent_id")


def _require_endings(table: Any, endings: Sequence[str]) -> None:
    """Raise Refusal for words in the column `ended` that are none of these.

    Tracks end as terminated or truncated: an episode of several agents that was abandoned or broken
    takes no more tracks, so that only some of its agents would be stored.
    """
    if "ended" in table.schema.names:
        words = set(table["ended"].unique().slice(0, 9).to_pylist()) - {None, *endings}
        if words:
            text = f"expected one of {', '.join(endings)}, or null, got {sorted(words)!r:.200}"
            raise Refusal("invalid", text, "$.ended")
