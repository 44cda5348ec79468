"""Match the columns of a bulk request to a policy: which are required, and their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingest.columns.arrow_kinds import is_bytes, is_text, load_arrow
from ingest.columns.leaf_columns import LeafColumn
from ingest.episodes.policy_rules import PolicyRules
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import policy_of_id
from storage.experience.step_columns import STEP_COLUMNS

NUMBERS, INTEGERS, TRUTH, TEXT, JSON = "a number", "an integer", "true or false", "text", "JSON"
NEEDED = {"eps_id": TEXT, "rewards": NUMBERS}
OPTIONAL = {
    "t": INTEGERS,
    "agent_id": TEXT,
    "agents": INTEGERS,
    "terminateds": TRUTH,
    "truncateds": TRUTH,
    "ended": TEXT,
    "infos": JSON,
    "policy_id": TEXT,
    "source": TEXT,
    "training_enabled": TRUTH,
    "continues": TEXT,
    "tags": JSON,
} | {
    column.name: NUMBERS if column.is_real else INTEGERS
    for column in STEP_COLUMNS
    if column.in_bulk and column.name not in NEEDED
}
_UNREAD = {"source", "agent_id", "policy_id"}


class Form:
    """The columns of a schema as a policy uses them. Raises Refusal if they do not fit it."""

    def __init__(self, schema: Any, rules: PolicyRules) -> None:
        arrow = load_arrow()
        self.rules, names = rules, schema.names
        obs, actions = rules.observation.leaves, rules.action.leaves
        needed = NEEDED.keys() | {leaf.column("obs") for leaf in obs}
        needed |= {leaf.column("actions") for leaf in actions}
        finals = {leaf.column("final_obs") for leaf in obs}
        known = needed | finals | OPTIONAL.keys()
        unknown = {name for name in names if name not in known or names.count(name) > 1}
        if unknown or not needed <= {*names}:
            text = f"unknown or repeated columns {sorted(unknown)}"
            raise Refusal("invalid", f"{text}, missing columns {sorted(needed - {*names})}", "$")
        self.hidden = {path.partition(".")[0] for path in rules.declaration.redact}
        kinds = dict(zip(names, schema.types, strict=True))
        hidden = "obs" in self.hidden
        self.leaves = {
            prefix: [
                LeafColumn(name, kinds[name], leaf, hidden=hidden and prefix != "actions")
                for leaf in leaves
                if (name := leaf.column(prefix)) in kinds
            ]
            for prefix, leaves in (("obs", obs), ("actions", actions), ("final_obs", obs))
        }
        self.has_finals = finals <= {*names}
        self.has_tracks = "env_t" in names and not arrow.types.is_null(kinds["env_t"])
        unread = _UNREAD - {"agent_id"} if self.has_tracks else _UNREAD
        if self.has_tracks and "agent_id" not in names:
            raise Refusal("invalid", "expected agent_id with env_t, got no such column", "$")
        self.read = {}  # name -> its index in the table
        for place, (name, kind) in enumerate(kinds.items()):
            expected = {**NEEDED, **OPTIONAL}.get(name)
            if name in unread or (arrow.types.is_null(kind) and name in OPTIONAL):
                continue
            if expected is not None and not _holds(kind, expected):
                text = f"expected {expected} in each row, got a column of {kind!s:.80}"
                raise Refusal("invalid", text, f"$.{name}")
            self.read[name] = place
        texts = any(leaf.is_text for leaf in (*obs, *actions))
        self.is_slow = texts or "infos" in self.read or bool(rules.declaration.redact)


class Forms:
    """A cache of the forms of the latest schemas: senders of small requests repeat theirs."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Any, Form]] = {}

    def get(self, schema: Any, rules: PolicyRules) -> Form:
        """Return a schema's form. Raises Refusal."""
        known = self._known.get((id(schema), id(rules)))
        if known is None:
            if len(self._known) >= 64:
                self._known.clear()
            known = self._known[id(schema), id(rules)] = (schema, Form(schema, rules))
        return known[1]


def _holds(kind: Any, expected: str) -> bool:
    types = load_arrow().types
    if expected == NUMBERS:
        return bool(types.is_integer(kind) or types.is_floating(kind))
    if expected == INTEGERS:
        return bool(types.is_integer(kind))
    if expected == TRUTH:
        return bool(types.is_boolean(kind))
    return is_text(kind) or (expected == JSON and is_bytes(kind))


def policy_of(table: Any, policies: Mapping[str, PolicyDeclaration]) -> PolicyDeclaration:
    """Return the one policy of a request's rows. Raises Refusal."""
    names = [None]
    if table.schema.names.count("policy_id") == 1:
        names = table["policy_id"].unique().slice(0, 2).to_pylist()
    name = names[0] if len(names) == 1 else ""
    policy = policies.get(policy_of_id(name, policies))
    if policy is None:
        got = repr(name) if name else "none or several"
        text = f"expected one policy for all rows, of {sorted(policies)}, got {got:.100}"
        raise Refusal("invalid", text, "$.policy_id")
    return policy
