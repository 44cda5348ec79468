"""The columns of a bulk import as episodes of wire events.

`BulkColumns.of` checks the table's form; `episodes` makes the events, an episode at a time. Pure
Python over lists: it runs in a thread beside the event loop, and touches nothing of the collector.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ingest import wire
from ingest.errors import Refusal
from storage.codec import Codec
from storage.declarations import PolicyDeclaration
from storage.episode import DEFAULT_AGENT, DEFAULT_POLICY
from storage.leaf import Leaf
from storage.spaces import Dict, Space, Tuple

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
_PLACE = re.compile(r"\$(?:\.events)?\[(\d+)\](?:\.(\w+))?")
_COLUMN = {"action": "actions", "reward": "rewards", "info": "infos", "truncated": "truncateds"}


@dataclass(frozen=True)
class BulkEpisode:
    """One episode of an import: its number in the table, its rows [begin, end), its events."""

    number: int
    begin: int
    end: int
    events: list[wire.Event]

    def row(self, index: int) -> int:
        """The row that event `index` came from; the start is 0."""
        return min(max(self.begin, self.begin + index - 1), self.end - 1)

    def place(self, index: int, field: str) -> str:
        """Where event `index` has its field in the table."""
        if field == "obs" and index > self.end - self.begin:
            field = "final_obs"
        return f"$.{_COLUMN.get(field, field or 'eps_id')}[{self.row(index)}]"


def place_of(path: str | None) -> tuple[int, str]:
    """The index and the field of a path such as `$.events[3].obs`; (0, "") for any other."""
    found = _PLACE.match(path or "")
    return (0, "") if found is None else (int(found[1]), found[2] or "")


class BulkColumns:
    """A checked table as lists."""

    def __init__(self, table: Any, policy: PolicyDeclaration) -> None:
        """`table` is a pyarrow.Table. Raises Refusal for columns that do not fit the policy."""
        self.policy = policy
        observation, action = Codec(policy.observation), Codec(policy.action)
        finals = {leaf.column("final_obs") for leaf in observation.leaves}
        needed = NEEDED | {leaf.column("obs") for leaf in observation.leaves}
        needed |= {leaf.column("actions") for leaf in action.leaves}
        names = table.column_names
        unknown = {n for n in names if n not in needed | finals | OPTIONAL or names.count(n) > 1}
        if unknown or not needed <= set(names):
            text = f"unknown or repeated columns {sorted(unknown)}"
            raise Refusal("invalid", f"{text}, missing columns {sorted(needed - set(names))}", "$")
        self.rows: int = table.num_rows
        plain = [name for name in names if name in OPTIONAL | NEEDED]
        self._lists: dict[str, list[Any]] = {name: table[name].to_pylist() for name in plain}
        self._obs = _values(table, "obs", observation)
        self._actions = _values(table, "actions", action)
        has_finals = finals <= set(names)
        self._finals = _values(table, "final_obs", observation) if has_finals else None
        agents = set(self._lists.get("agent_id", ())) - {None, DEFAULT_AGENT}
        if agents:
            text = f"expected the agent {DEFAULT_AGENT!r}, got {sorted(map(str, agents))!r:.200}"
            raise Refusal("invalid", text, "$.agent_id")

    def episodes(self, *, numbered: bool) -> Iterator[BulkEpisode]:
        """The episodes; with sequence numbers when the import may be repeated. Raises Refusal."""
        for number, (begin, end) in enumerate(self._ranges()):
            items = list(self._events(begin, end, number if numbered else None))
            episode = BulkEpisode(number, begin, end, [])
            try:
                episode.events.extend(msgspec.convert(items, list[wire.Event]))
            except msgspec.ValidationError as error:
                text, _, path = str(error).partition(" - at `")
                raise Refusal("invalid", text, episode.place(*place_of(path))) from error
            yield episode

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """[begin, end) of each episode. Raises Refusal when one comes in two places."""
        ids, seen, begin = self._lists["eps_id"], set(), 0
        for row in range(1, self.rows + 1):
            if row < self.rows and ids[row] == ids[begin]:
                continue
            name = ids[begin]
            if not isinstance(name, str) or not name:
                raise Refusal("invalid", "expected an episode id", f"$.eps_id[{begin}]")
            if name in seen:
                text = f"expected the rows of episode {name!r} behind each other"
                raise Refusal("invalid", text, f"$.eps_id[{begin}]")
            seen.add(name)
            yield begin, row
            begin = row

    def _get(self, name: str, row: int, default: Any = None) -> Any:
        column = self._lists.get(name)
        value = None if column is None else column[row]
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
            raise Refusal(
                "invalid", f"expected a JSON object, got {text!r:.80}", f"$.{name}[{row}]"
            )
        return value

    def _events(self, begin: int, end: int, start: int | None) -> Iterator[Mapping[str, Any]]:
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
            if get("t", row, t) != t:
                text = f"Episode {name}: expected t to run from 0, got {get('t', row)!r} for {t}"
                raise Refusal("invalid", text, f"$.t[{row}]", name)
            yield {
                "type": "log_action",
                "episode_id": name,
                "seq": t + 1 if numbered else None,
                "obs": self._obs[row],
                "action": self._actions[row],
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
            "obs": None if self._finals is None else self._finals[last],
            "truncated": get("truncateds", last, get("ended", last, "terminated") != "terminated"),
        }


def policy_of(table: Any | None, policies: Mapping[str, PolicyDeclaration]) -> PolicyDeclaration:
    """The one policy of a request's rows; None stands for those that name none. Raises Refusal."""
    names = {None}
    if table is not None and table.column_names.count("policy_id") == 1:
        names = set(table["policy_id"].unique().to_pylist())
    name = names.pop() if len(names) == 1 else ""
    if name is None:
        name = next(iter(policies)) if len(policies) == 1 else DEFAULT_POLICY
    policy = policies.get(name)
    if policy is None:
        got = repr(name) if name else f"{len(names)} different ones"
        text = f"expected one policy for all rows, of {sorted(policies)}, got {got:.100}"
        raise Refusal("invalid", text, "$.policy_id")
    return policy


def _values(table: Any, prefix: str, codec: Codec) -> list[Any]:
    """One wire value per row: leaves by column, put together as the space says."""
    leaves = codec.leaves
    columns = [table[leaf.column(prefix)].to_pylist() for leaf in leaves]
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
