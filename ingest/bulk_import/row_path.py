"""The columns of a bulk import as episodes of wire events.

`BulkColumns` checks the table's form; `episodes` makes the events, an episode at a time. Pure
Python over lists: it runs in a thread beside the event loop, and touches nothing of the collector.

Whole columns as lists would take ten times their bytes, and the interpreter for seconds at a time.
So only a few rows are lists at a time: the window, which moves on with whoever asks for a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingest.bulk_import.arrow_stream import is_list, load_arrow
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import DEFAULT_AGENT, DEFAULT_POLICY
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Dict, Space, Tuple
from storage.spaces.leaves import Leaf

Array: TypeAlias = NDArray[Any]

NEEDED = {"eps_id", "rewards"}
OPTIONAL = {
    "t",
    "agent_id",
    "terminateds",
    "truncateds",
    "ended",
    "infos",
    "action_logp",
    "policy_id",
    "policy_version",
    "source",
    "pass_prob",
    "ts",
    "training_enabled",
    "continues",
    "tags",
}
WINDOW_ROWS, WINDOW_BYTES, WINDOW_VALUES = 256, 65_536, 8_192
"""So much of a table is lists at a time: what Arrow makes of it within a millisecond or so, for
which it does not let go of the interpreter. A row is never cut."""

WHOLE_ROWS, PIECE_EVENTS = 1_000, 64
"""An episode of more rows is taken in pieces of so many events, each in turn with what others send:
some 40 ms at a time is the most that they wait."""

_PLACE = re.compile(r"\$(?:\.events)?\[(\d+)\](?:\.(\w+))?")
_COLUMN = {"action": "actions", "reward": "rewards", "info": "infos", "truncated": "truncateds"}


@dataclass(frozen=True)
class BulkEpisode:
    """An episode of an import: its number in the table, its rows [begin, end), its events.

    Of a long one it is a piece: the events from the `first` on.
    """

    number: int
    begin: int
    end: int
    events: list[wire.Event]
    first: int = 0

    @property
    def rest(self) -> int:
        """How many events of the episode come after these."""
        return self.end - self.begin + 2 - self.first - len(self.events)

    def row(self, index: int) -> int:
        """The row that event `index` of these came from; an episode's start is event 0."""
        return min(max(self.begin, self.begin + self.first + index - 1), self.end - 1)

    def place(self, index: int, field: str) -> str:
        """Where event `index` of these has its field in the table."""
        if field == "obs" and self.first + index > self.end - self.begin:
            field = "final_obs"
        return f"$.{_COLUMN.get(field, field or 'eps_id')}[{self.row(index)}]"


def place_of(path: str | None) -> tuple[int, str]:
    """The index and the field of a path such as `$.events[3].obs`; (0, "") for any other."""
    found = _PLACE.match(path or "")
    return (0, "") if found is None else (int(found[1]), found[2] or "")


class BulkColumns:
    """A table of the right form, whose rows nobody has looked at yet."""

    def __init__(self, table: Any, policy: PolicyDeclaration, *, numbered: bool) -> None:
        """`table` is a pyarrow.Table. Raises Refusal for columns that do not fit the policy.

        Events are `numbered`, with starts and sequence numbers, when the import may be repeated.
        """
        self.policy, self.numbered = policy, numbered
        self._observation, self._action = Codec(policy.observation), Codec(policy.action)
        finals = {leaf.column("final_obs") for leaf in self._observation.leaves}
        needed = NEEDED | {leaf.column("obs") for leaf in self._observation.leaves}
        needed |= {leaf.column("actions") for leaf in self._action.leaves}
        names = table.column_names
        unknown = {n for n in names if n not in needed | finals | OPTIONAL or names.count(n) > 1}
        if unknown or not needed <= set(names):
            text = f"unknown or repeated columns {sorted(unknown)}"
            raise Refusal("invalid", f"{text}, missing columns {sorted(needed - set(names))}", "$")
        self.rows: int = table.num_rows
        self.nbytes: int = table.nbytes
        self._has_finals = finals <= set(names)
        _require_one_agent(table)
        table = table.combine_chunks()  # to find a row in thousands of chunks takes long
        self._columns: dict[str, Any] = dict(zip(names, table.columns, strict=True))
        self._wide = max(1, min(WINDOW_ROWS, WINDOW_BYTES * self.rows // max(1, self.nbytes)))
        self._values_before = np.append(0, np.cumsum(self._values_of_rows()))
        self._begin = self._end = 0  # the window
        self._lists: dict[str, list[Any]] = {}
        self._begins = _begins(self._columns["eps_id"])
        if not numbered:
            self._require_short()

    def check(self) -> None:
        """Look at every row. Raises Refusal at what is no event."""
        for place in self._places():
            for _ in self._pieces(*place):
                continue

    def episodes(self, skip: Container[int] = ()) -> Iterator[BulkEpisode]:
        """The episodes but those of the numbers to skip, long ones in pieces.

        What is skipped may grow meanwhile: an episode's next piece is not made then. Raises Refusal
        as `check` does.
        """
        for number, begin, end in self._places():
            if number in skip:
                continue
            if end - begin <= WHOLE_ROWS:
                pieces = self._pieces(number, begin, end)
                yield BulkEpisode(number, begin, end, list(chain.from_iterable(pieces)))
                continue
            first = 0
            for events in self._pieces(number, begin, end, PIECE_EVENTS):
                yield BulkEpisode(number, begin, end, events, first)
                first += len(events)
                if number in skip:
                    break

    @property
    def count(self) -> int:
        """How many episodes there are."""
        return len(self._begins)

    def bounds(self, number: int) -> tuple[int, int]:
        """The rows [begin, end) of an episode."""
        begins, after = self._begins, number + 1
        return begins[number], begins[after] if after < len(begins) else self.rows

    def name(self, number: int) -> str:
        """The id of an episode."""
        text: str = self._columns["eps_id"][self._begins[number]].as_py()
        return text

    def long(self) -> list[int]:
        """The numbers of the episodes that come in pieces."""
        lengths = np.diff([*self._begins, self.rows])
        return [int(number) for number in np.flatnonzero(lengths > WHOLE_ROWS)]

    def _require_short(self) -> None:
        """Refuse what would be taken in pieces, and could not be gone on with by a repetition."""
        for number in self.long()[:1]:
            row = self._begins[number]
            text = (
                f"expected an Idempotency-Key, or at most {WHOLE_ROWS} rows of an episode whose "
                f"rows are looked at one by one, got more for episode {number} of the body"
            )
            raise Refusal("too_large", text, f"$.eps_id[{row}]")

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Number and rows [begin, end) of each episode."""
        for number, (begin, end) in enumerate(pairwise(chain(self._begins, [self.rows]))):
            yield number, begin, end

    def _pieces(
        self, number: int, begin: int, end: int, size: int = WINDOW_ROWS
    ) -> Iterator[list[wire.Event]]:
        """The events of an episode, some at a time."""
        events, made = self._events(begin, end, number if self.numbered else None), 0
        while items := list(islice(events, size)):
            try:
                yield msgspec.convert(items, list[wire.Event])
            except msgspec.ValidationError as error:
                text, _, path = str(error).partition(" - at `")
                index, field = place_of(path)
                place = BulkEpisode(number, begin, end, []).place(made + index, field)
                raise Refusal("invalid", text, place) from error
            made += len(items)

    def _values_of_rows(self) -> Array:
        """How many values the lists of each row hold, int64 (rows,). Raises Refusal for too many.

        A few more or less than its space has are for its codec to refuse.
        """
        total = np.zeros(self.rows, np.int64)
        if not self.rows:
            return total
        for prefix, codec in (
            ("obs", self._observation),
            ("actions", self._action),
            ("final_obs", self._observation),
        ):
            for leaf in codec.leaves:
                column, expected = leaf.column(prefix), math.prod(leaf.shape)
                if column not in self._columns or not is_list(self._columns[column].type):
                    continue
                for counts in _slots(self._columns[column]):
                    total += counts
                    row = int(counts.argmax())
                    if counts[row] > 4 * expected + 64:
                        text = f"expected {expected} values, got {counts[row]}"
                        raise Refusal("invalid", text, f"$.{column}[{row}]")
        return total

    def _look_at(self, row: int) -> None:
        """Move the window so that it begins with a row, unless the row is in it."""
        if self._begin <= row < self._end:
            return
        most = self._values_before[row] + WINDOW_VALUES
        last = int(self._values_before.searchsorted(most, "right")) - 1
        self._begin, self._end = row, min(row + self._wide, max(row + 1, last), self.rows)
        self._lists = {
            name: column.slice(row, self._end - row).to_pylist()
            for name, column in self._columns.items()
        }
        self._obs = _values(self._lists, "obs", self._observation)
        self._actions = _values(self._lists, "actions", self._action)
        self._finals = (
            _values(self._lists, "final_obs", self._observation) if self._has_finals else None
        )

    def _get(self, name: str, row: int, default: Any = None) -> Any:
        column = self._lists.get(name)
        value = None if column is None else column[row - self._begin]
        return default if value is None else value

    def _reward(self, row: int) -> Any:
        value = self._get("rewards", row)
        if value is None:
            raise Refusal("invalid", "expected a number, got null", f"$.rewards[{row}]")
        return value

    def _json(self, name: str, row: int) -> Any:
        text = self._get(name, row)
        if text is None or text == "":
            return None
        try:
            value = msgspec.json.decode(text)
        except (TypeError, msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
            value = None
        if not isinstance(value, dict):
            hidden = any(path.partition(".")[0] == name for path in self.policy.redact)
            came = "other text, not shown because it is redacted" if hidden else f"{text!r:.80}"
            raise Refusal("invalid", f"expected a JSON object, got {came}", f"$.{name}[{row}]")
        return value

    def _events(self, begin: int, end: int, start: int | None) -> Iterator[Mapping[str, Any]]:
        self._look_at(begin)
        get, name, last = self._get, self._get("eps_id", begin), end - 1
        numbered = start is not None
        yield {
            "type": "start",
            "episode_id": name,
            "start": start,
            "policy_id": self.policy.policy_id,
            "training_enabled": get("training_enabled", begin, True),
            "tags": self._json("tags", begin),
            "continues": get("continues", begin),
            "ts": get("ts", begin),
        }
        for t, row in enumerate(range(begin, end)):
            self._look_at(row)
            if get("t", row, t) != t:
                text = f"Episode {name}: expected t to run from 0, got {get('t', row)!r} for {t}"
                raise Refusal("invalid", text, f"$.t[{row}]", name)
            yield {
                "type": "log_action",
                "episode_id": name,
                "seq": t + 1 if numbered else None,
                "obs": self._obs[row - self._begin],
                "action": self._actions[row - self._begin],
                "action_logp": get("action_logp", row),
                "policy_version": get("policy_version", row, -1),
                "pass_prob": get("pass_prob", row, 1.0),
                "reward": self._reward(row),
                "info": self._json("infos", row),
                "ts": get("ts", row),
                "replayed": True,
            }
        yield {
            "type": "end",
            "episode_id": name,
            "seq": end - begin + 1 if numbered else None,
            "obs": None if self._finals is None else self._finals[last - self._begin],
            "truncated": get("truncateds", last, get("ended", last, "terminated") != "terminated"),
        }


def policy_of(table: Any | None, policies: Mapping[str, PolicyDeclaration]) -> PolicyDeclaration:
    """The one policy of a request's rows; None stands for those that name none. Raises Refusal."""
    names = [None]
    if table is not None and table.column_names.count("policy_id") == 1:
        names = table["policy_id"].unique().slice(0, 2).to_pylist()
    name = names[0] if len(names) == 1 else ""
    if name is None:
        name = next(iter(policies)) if len(policies) == 1 else DEFAULT_POLICY
    policy = policies.get(name)
    if policy is None:
        got = repr(name) if name else "none or several"
        text = f"expected one policy for all rows, of {sorted(policies)}, got {got:.100}"
        raise Refusal("invalid", text, "$.policy_id")
    return policy


def _require_one_agent(table: Any) -> None:
    """Raise Refusal unless all rows are of the one agent that has no name."""
    if "agent_id" not in table.column_names:
        return
    agents = set(table["agent_id"].unique().slice(0, 9).to_pylist()) - {None, DEFAULT_AGENT}
    if agents:
        text = f"expected the agent {DEFAULT_AGENT!r}, got {sorted(map(str, agents))!r:.200}"
        raise Refusal("invalid", text, "$.agent_id")


def _begins(ids: Any) -> list[int]:
    """The rows at which episodes begin. Raises Refusal when one comes in two places."""
    arrow, compute = load_arrow()
    if not len(ids):
        return []
    if not (arrow.types.is_string(ids.type) or arrow.types.is_large_string(ids.type)):
        raise Refusal("invalid", "expected an episode id", "$.eps_id[0]")
    nameless = compute.index(compute.equal(compute.fill_null(ids, ""), ""), True).as_py()
    if nameless >= 0:
        raise Refusal("invalid", "expected an episode id", f"$.eps_id[{nameless}]")
    differs = compute.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1))
    found = np.append(0, np.flatnonzero(differs.to_numpy()) + 1)
    names, begins = ids.take(arrow.array(found)), found.tolist()
    if compute.count_distinct(names).as_py() < len(begins):
        name, row = _repeated(names.to_pylist(), begins)
        text = f"expected the rows of episode {name!r} behind each other"
        raise Refusal("invalid", text, f"$.eps_id[{row}]")
    return begins


def _slots(column: Any) -> Iterator[Array]:
    """How many lists or values each row has at each level of a column of lists, int64 (rows,)."""
    _, compute = load_arrow()

    def lengths(lists: Any) -> Array:
        found: Array = compute.fill_null(compute.list_value_length(lists), 0).to_numpy()
        return found.astype(np.int64)

    counts = lengths(column)
    yield counts
    inner = compute.list_flatten(column)
    while is_list(inner.type):
        ends = np.append(0, np.cumsum(counts))
        below = np.append(0, np.cumsum(lengths(inner)))
        counts = below[ends[1:]] - below[ends[:-1]]
        yield counts
        inner = compute.list_flatten(inner)


def _repeated(names: Sequence[str], begins: Sequence[int]) -> tuple[str, int]:
    """The first name that was there before, and where it comes again."""
    seen = set[str]()
    for name, row in zip(names, begins, strict=True):
        if name in seen:
            return name, row
        seen.add(name)
    return "", 0


def _values(lists: Mapping[str, list[Any]], prefix: str, codec: Codec) -> list[Any]:
    """One wire value per row: leaves by column, put together as the space says."""
    leaves = codec.leaves
    columns = [lists[leaf.column(prefix)] for leaf in leaves]
    if len(leaves) == 1 and not leaves[0].path:
        return [_leaf(value, leaves[0]) for value in columns[0]]
    rows: list[Any] = []
    for values in zip(*columns, strict=True):
        items = {leaf.path: _leaf(v, leaf) for v, leaf in zip(values, leaves, strict=True)}
        absent = any(item is None for item in items.values())
        rows.append(None if absent else _nest(items, codec.space))
    return rows


def _leaf(value: Any, leaf: Leaf) -> Any:
    """A leaf as the wire has it; what does not fit stays as it is, for the codec to refuse."""
    try:
        if isinstance(value, bytes):
            if leaf.is_text:
                return value.decode()
            return {"dtype": leaf.dtype.name, "shape": list(leaf.shape), "data": value}
        if isinstance(value, list) and len(leaf.shape) > 1:
            return np.asarray(value, leaf.dtype).reshape(leaf.shape)
    except (TypeError, ValueError, OverflowError):
        return value
    return value


def _nest(items: Mapping[str, Any], space: Space, path: str = "") -> Any:
    """The value of a space from its leaves by path."""
    prefix = f"{path}." if path else ""
    if isinstance(space, Dict):
        return {name: _nest(items, inner, prefix + name) for name, inner in space.spaces}
    if isinstance(space, Tuple):
        return [_nest(items, s, f"{prefix}{i}") for i, s in enumerate(space.spaces)]
    return items[path]
