"""Redaction: removing from events the values that must not reach the disk.

A `Redaction` holds one policy's `redact` rules (`storage.declarations.redaction_rules`). It is
applied to a wire event as soon as its episode is found, before anything else is judged. So redacted
values are in no journal, no shard, no message about the event, and no cause of a broken episode.
The result is deterministic, so that retries are still recognized.

A pseudonym is an HMAC under the root's key (`keys/redaction.key`): a value has the same pseudonym
in all fields and episodes of the root, and cannot be guessed by trial without the key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from ingest.episodes.event_checks import invalid
from ingest.episodes.policy_rules import PolicyRules
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import label_of
from ingest.protocol.errors import Refusal
from storage.declarations.redaction_rules import HASH_DIGITS, leaf_rules
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Discrete, MultiDiscrete, SpaceError, Text
from storage.spaces.leaves import Leaf, bounds_of

E = TypeVar("E", bound=wire.Event | wire.GetAction)


def pseudonym(key: bytes, value: Any) -> str:
    """32 hex digits that stand for a value; a number and its text have the same pseudonym."""
    return _digest(key, value).hex()[:HASH_DIGITS]


def _digest(key: bytes, value: Any) -> bytes:
    return hmac.digest(key, _text(value).encode("utf-8", "surrogatepass"), hashlib.sha256)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):  # values that JSON lacks are refused later
        return repr(value)


class Redaction:
    """The rules of one policy, applied to its events."""

    def __init__(self, redact: Mapping[str, str], observation: Codec, key: bytes) -> None:
        self._key = key
        self._observation = observation
        self._leaves = leaf_rules(redact, observation.space)
        self._infos = _paths(redact, "infos")
        self._tags = _paths(redact, "tags")

    def event(self, event: E) -> E:
        """Return the event without redacted values.

        Raises Refusal for an invalid observation and for an info that is nested too deeply.
        """
        changes: dict[str, Any] = {}
        if isinstance(event, wire.Start):
            if event.tags and self._tags:
                changes["tags"] = self._mapping(event.tags, self._tags)
        else:
            obs = getattr(event, "obs", None)
            if obs is not None and self._leaves:
                changes["obs"] = self.observation(self.checked(event, obs))
            info = getattr(event, "info", None)
            if info and self._infos:
                _require_shallow(event, info)
                changes["info"] = self._mapping(info, self._infos)
        return msgspec.structs.replace(event, **changes) if changes else event

    @property
    def of_observations(self) -> bool:
        """Whether any part of an observation is redacted."""
        return bool(self._leaves)

    def checked(self, event: wire.Event | wire.GetAction, obs: Any) -> bytes:
        """Encode an observation canonically. Raises Refusal, which shows none of its values."""
        try:
            return self._observation.from_wire(obs, "obs")
        except SpaceError:
            # not `from` the error, whose text shows the values
            raise Refusal(
                "invalid",
                f"Episode {label_of(event)}: expected an observation of the policy's space, got "
                "another value, which is not shown because parts of it are redacted",
                "obs",
                event.episode_id,
                agent_id=event.agent_id,
            ) from None

    def observation(self, data: bytes) -> bytes:
        """Replace the values of redacted leaves; takes and returns canonical bytes."""
        if not self._leaves:
            return data
        columns = dict(self._observation.columns(data, 1, [len(data)]))
        for leaf, rule in self._leaves:
            value = columns[leaf.path][0]
            columns[leaf.path] = (
                [self._stand_in(leaf, rule, value)]
                if leaf.is_text
                else np.asarray(self._stand_in(leaf, rule, value), leaf.dtype)[None]
            )
        return self._observation.encode_columns(columns, 1)[0]

    def rule_of(self, leaf: Leaf) -> str | None:
        """The rule of a leaf of observations."""
        return next((rule for one, rule in self._leaves if one.path == leaf.path), None)

    def column(self, leaf: Leaf, values: Any) -> Any:
        """Redact a column of valid values of one leaf of observations.

        A column is an array (count, *shape), for Text a list of strings.
        """
        rule = self.rule_of(leaf)
        if rule is None or not len(values):
            return values
        if leaf.is_text:
            stands = {value: self._stand_in(leaf, rule, value) for value in {*values}}
            return [stands[value] for value in values]
        if rule == "drop":
            return np.broadcast_to(_nothing(leaf), values.shape)
        rows, which = np.unique(values.reshape(len(values), -1), axis=0, return_inverse=True)
        made = [self._stand_in(leaf, rule, row if leaf.shape else row[0]) for row in rows]
        return np.asarray(made, leaf.dtype)[which.reshape(-1)].reshape(values.shape)

    def info(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an info, which is not nested too deeply, without redacted values."""
        return self._mapping(info, self._infos) if self._infos else info

    def tags(self, tags: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an episode's tags without redacted values."""
        return self._mapping(tags, self._tags) if self._tags else tags

    def _stand_in(self, leaf: Leaf, rule: str, value: Any) -> Any:
        if rule == "drop":
            return _nothing(leaf)
        space = leaf.space
        if isinstance(space, Text):
            return self._pseudonym(value)[: space.max_length]
        if isinstance(space, Discrete):
            return self._code(int(value), space.n, space.start)
        if not isinstance(space, MultiDiscrete):
            raise TypeError(f"{leaf.path}: {type(space).__name__} has no pseudonym")
        ranges = zip(space.nvec, space.start, strict=True)
        return [self._code(int(item), *one) for item, one in zip(value, ranges, strict=True)]

    def _pseudonym(self, value: Any) -> str:
        return pseudonym(self._key, value)

    def _code(self, value: int, n: int, start: int) -> int:
        return start + int.from_bytes(_digest(self._key, value)[:16], "big") % n

    def _mapping(self, given: Mapping[str, Any], rules: Mapping[str, str]) -> dict[str, Any]:
        """Return a copy without what the rules name; `given` is not changed."""
        if "" in rules:
            return {}
        found: dict[str, Any] = self._below(given, "", rules)
        return found

    def _below(self, value: Any, prefix: str, rules: Mapping[str, str]) -> Any:
        """Return a copy of the value at a path (`prefix` ends with a dot, or is empty), redacted.

        The items of lists are redacted one by one. Keys may contain dots: a rule's path also
        matches keys that together spell it.
        """
        if isinstance(value, (list, tuple)):
            return [self._below(item, prefix, rules) for item in value]
        if not isinstance(value, Mapping):
            return value
        result: dict[str, Any] = {}
        for key, item in value.items():
            path = f"{prefix}{_text(key)}"
            rule = _rule(path, prefix, rules)
            if rule == "drop":
                continue
            if any(one.startswith(f"{path}.") for one in rules):
                item = self._below(item, f"{path}.", rules)
            result[key] = item if rule is None else self._pseudonym(item)
        return result


def _require_shallow(event: wire.Event | wire.GetAction, info: Any) -> None:
    """Raise Refusal for an info that is nested too deeply, before it is searched."""
    try:
        wire.require_shallow(info)
    except ValueError as error:
        raise invalid(event, f"info: expected JSON values: {error}") from None


def _paths(redact: Mapping[str, str], part: str) -> dict[str, str]:
    """Path below `part` -> rule, the longest path first; "" stands for the whole part."""
    found = {
        path.partition(".")[2]: rule
        for path, rule in redact.items()
        if path.partition(".")[0] == part
    }
    return {path: found[path] for path in sorted(found, key=len, reverse=True)}


def _rule(path: str, prefix: str, rules: Mapping[str, str]) -> str | None:
    """The rule of a path, or of the longest path above it that goes beyond `prefix`."""
    for one, rule in rules.items():
        if len(one) >= len(prefix) and f"{path}.".startswith(f"{one}."):
            return rule
    return None


def _nothing(leaf: Leaf) -> Any:
    """The valid value nearest to zero; for Text, the shortest one."""
    space = leaf.space
    if isinstance(space, Text):
        return (space.charset or "-")[0] * space.min_length
    bounds = bounds_of(space)
    zero = np.zeros(leaf.shape, leaf.dtype)
    return zero if bounds is None else np.clip(zero, *bounds).astype(leaf.dtype)


class Redactor:
    """The redactions of one collector's policies."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[tuple[str, str], Redaction] = {}

    def of(self, rules: PolicyRules) -> Redaction | None:
        """The redaction by an episode's rules; None if nothing is redacted."""
        declared = rules.declaration
        if not declared.redact:
            return None
        name = declared.policy_id, rules.schema_id
        found = self._known.get(name)
        if found is None:
            found = Redaction(declared.redact, rules.observation, self._key)
            self._known[name] = found
        return found

    def event(self, event: E, rules: PolicyRules | None) -> E:
        """Return the event as the rules' policy redacts it. Raises Refusal."""
        redaction = None if rules is None else self.of(rules)
        return event if redaction is None else redaction.event(event)

    def observation(self, obs: bytes, rules: PolicyRules) -> bytes:
        """Redact an observation by these rules; takes and returns canonical bytes."""
        redaction = self.of(rules)
        return obs if redaction is None else redaction.observation(obs)
