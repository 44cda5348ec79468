"""Bulk import: an Arrow stream of shard columns becomes events.

`POST /v1/steps` takes one row a step, rows of an episode behind each other in order of `t`. Needed:
`eps_id`, `obs[.path]`, `actions[.path]`, `rewards`; optional: `t`, `terminateds`, `truncateds`,
`final_obs[.path]`, `infos`, `action_logp`, `policy_version`, `pass_prob`, `ts`,
`training_enabled`, `continues`, `tags`, `policy_id`, `source`, `agent_id`. An episode that has
neither `terminateds` nor `truncateds` on its last row ends as terminated. The body carries its
CRC-32 in the header `Headrace-CRC32` (8 hex digits), because Arrow has no checksum of its own.

With an `Idempotency-Key` the import may be repeated: episodes that are known under it are skipped.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from ingest import wire
from ingest.collector import Collector
from ingest.errors import Refusal
from ingest.http import Request
from storage.codec import Codec
from storage.declarations import PolicyDeclaration
from storage.ranges import RangeSet
from storage.spaces import Dict, Space, Tuple

NEEDED = ("eps_id", "rewards")
OPTIONAL = {
    "t",
    "agent_id",
    "terminateds",
    "truncateds",
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


def read_steps(request: Request, collector: Collector) -> Iterator[wire.Batch]:
    """Batches of events for a bulk request, an episode never split over two. Raises Refusal."""
    if request.content_type != wire.ARROW:
        raise Refusal(
            "unsupported_media", f"expected {wire.ARROW}, got {request.content_type!r:.80}"
        )
    _check_crc(request)
    table = _read_table(request.body)
    policy = _policy(table, collector)
    columns = _Columns(table, policy)
    instance, known = None, RangeSet()
    key = request.headers.get(b"idempotency-key")
    if key is not None:
        name = f"bulk:{key.decode('latin-1')}"[:256]
        registered, _ = collector.register(wire.Register(name=name))
        instance, known = registered.instance, RangeSet(registered.starts)
    return _batches(columns, instance, known)


def _check_crc(request: Request) -> None:
    given = request.headers.get(b"headrace-crc32")
    found = f"{zlib.crc32(request.body):08x}"
    if given is None or given.decode("latin-1").lower() != found:
        shown = "none" if given is None else repr(given.decode("latin-1")[:40])
        raise Refusal("malformed", f"expected the header Headrace-CRC32: {found}, got {shown}")


def _read_table(body: bytes) -> Any:
    arrow = importlib.import_module("pyarrow")  # the first bulk request loads it, not the start
    try:
        table = arrow.ipc.open_stream(body).read_all()
        table.validate(full=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise Refusal("malformed", f"expected an Arrow stream: {error}") from error
    if table.num_rows > 1_000_000:
        raise Refusal("too_large", f"expected at most 1,000,000 rows, got {table.num_rows}")
    return table


def _policy(table: Any, collector: Collector) -> PolicyDeclaration:
    names = (
        set(table.column("policy_id").to_pylist()) if "policy_id" in table.column_names else set()
    )
    if len(names) > 1:
        raise Refusal("invalid", f"expected one policy a request, got {sorted(names)!r:.200}")
    name = names.pop() if names else None
    if name is None:
        name = next(iter(collector.policies)) if len(collector.policies) == 1 else "default"
    policy = collector.policies.get(name)
    if policy is None:
        raise Refusal(
            "invalid",
            f"expected a policy of {sorted(collector.policies)}, got {name!r}",
            "policy_id",
        )
    return policy


class _Columns:
    """The columns of a bulk request as Python lists and encoded values."""

    def __init__(self, table: Any, policy: PolicyDeclaration) -> None:
        self.policy = policy
        observation, action = Codec(policy.observation), Codec(policy.action)
        values = {leaf.column("obs"): leaf for leaf in observation.leaves}
        finals = {leaf.column("final_obs") for leaf in observation.leaves}
        actions = {leaf.column("actions") for leaf in action.leaves}
        unknown = set(table.column_names) - set(values) - finals - actions - OPTIONAL - set(NEEDED)
        missing = (set(NEEDED) | set(values) | actions) - set(table.column_names)
        if unknown or missing:
            text = f"unknown columns {sorted(unknown)}, missing columns {sorted(missing)}"
            raise Refusal("invalid", text, "$")
        self.rows = table.num_rows
        self._lists = {
            name: table.column(name).to_pylist()
            for name in table.column_names
            if name in OPTIONAL or name in NEEDED
        }
        self.obs = _values(table, "obs", observation)
        self.actions = _values(table, "actions", action)
        self.finals = (
            _values(table, "final_obs", observation)
            if finals <= set(table.column_names)
            else [None] * self.rows
        )

    def get(self, name: str, row: int, default: Any = None) -> Any:
        column = self._lists.get(name)
        value = None if column is None else column[row]
        return default if value is None else value

    def episodes(self) -> Iterator[tuple[int, int]]:
        """[begin, end) of each episode. Raises Refusal when one comes in two places."""
        ids, seen, begin = self._lists["eps_id"], set(), 0
        for row in range(1, self.rows + 1):
            if row == self.rows or ids[row] != ids[begin]:
                if not isinstance(ids[begin], str) or not ids[begin]:
                    raise Refusal("invalid", "expected an episode id", f"$.eps_id[{begin}]")
                if ids[begin] in seen:
                    text = f"expected the rows of episode {ids[begin]!r} behind each other"
                    raise Refusal("invalid", text, f"$.eps_id[{begin}]")
                seen.add(ids[begin])
                yield begin, row
                begin = row


def _values(table: Any, prefix: str, codec: Codec) -> list[Any]:
    """One wire value per row: leaves by column, put together as the space says."""
    columns = [table.column(leaf.column(prefix)).to_pylist() for leaf in codec.leaves]
    if len(codec.leaves) == 1 and not codec.leaves[0].path:
        return [_leaf(value, codec.leaves[0]) for value in columns[0]]
    rows: list[Any] = []
    for row in range(table.num_rows):
        by_path = {
            leaf.path: _leaf(column[row], leaf)
            for leaf, column in zip(codec.leaves, columns, strict=True)
        }
        rows.append(
            None if any(item is None for item in by_path.values()) else _nest(by_path, codec.space)
        )
    return rows


def _leaf(value: Any, leaf: Any) -> Any:
    if isinstance(value, bytes):
        if leaf.is_text:
            return value.decode(errors="surrogateescape")
        return {"dtype": leaf.dtype.name, "shape": list(leaf.shape), "data": value}
    if isinstance(value, list) and len(leaf.shape) > 1:
        array = np.asarray(value, leaf.dtype)
        return array.reshape(leaf.shape) if array.size == np.prod(leaf.shape) else value
    return value


def _nest(by_path: dict[str, Any], space: Space, path: str = "") -> Any:
    """The value of a space from its leaves by path."""
    prefix = f"{path}." if path else ""
    if isinstance(space, Dict):
        return {name: _nest(by_path, inner, prefix + name) for name, inner in space.spaces}
    if isinstance(space, Tuple):
        return [_nest(by_path, s, f"{prefix}{i}") for i, s in enumerate(space.spaces)]
    return by_path[path]


def _batches(columns: _Columns, instance: str | None, known: RangeSet) -> Iterator[wire.Batch]:
    events: list[dict[str, Any]] = []
    for number, (begin, end) in enumerate(columns.episodes()):
        if number in known:
            continue
        if events and len(events) + end - begin + 2 > wire.MAX_EVENTS:
            yield _batch(instance, events)
            events = []
        events.extend(_episode(columns, begin, end, None if instance is None else number))
    if events:
        yield _batch(instance, events)


def _batch(instance: str | None, events: list[dict[str, Any]]) -> wire.Batch:
    """The same checks as for a batch that came as JSON."""
    try:
        return msgspec.convert({"instance": instance, "events": events}, wire.Batch)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        raise Refusal("invalid", text, path.rstrip("`") or "$") from error


def _episode(
    columns: _Columns, begin: int, end: int, start: int | None
) -> Iterator[dict[str, Any]]:
    get, name = columns.get, columns.get("eps_id", begin)
    numbered = start is not None
    yield {
        "type": "start",
        "episode_id": name,
        "start": start,
        "policy_id": columns.policy.policy_id,
        "training_enabled": get("training_enabled", begin, True),
        "tags": _json(get("tags", begin), "tags", begin),
        "continues": get("continues", begin),
        "ts": get("ts", begin),
    }
    for row in range(begin, end):
        yield {
            "type": "log_action",
            "episode_id": name,
            "seq": row - begin + 1 if numbered else None,
            "obs": columns.obs[row],
            "action": columns.actions[row],
            "action_logp": get("action_logp", row),
            "policy_version": get("policy_version", row, -1),
            "pass_prob": get("pass_prob", row, 1.0),
            "reward": get("rewards", row),
            "info": _json(get("infos", row), "infos", row),
            "ts": get("ts", row),
        }
    yield {
        "type": "end",
        "episode_id": name,
        "seq": end - begin + 1 if numbered else None,
        "obs": columns.finals[end - 1],
        "truncated": get("truncateds", end - 1, False),
    }


def _json(text: Any, name: str, row: int) -> Any:
    if text is None or text == "":
        return None
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise Refusal("invalid", "expected a JSON object", f"$.{name}[{row}]") from error
    if not isinstance(value, dict):
        raise Refusal("invalid", "expected a JSON object", f"$.{name}[{row}]")
    return value
