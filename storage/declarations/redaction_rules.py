"""The `redact` rules of a policy file: fields that are never stored with their values.

    "redact": {"infos.email": "drop", "tags.user": "hash", "obs.user_id": "hash"}

A path begins with `obs`, `infos` or `tags` and includes everything below it. `drop` removes a
field. An observation has a fixed structure, so its field gets the allowed value nearest to zero
instead (for a text: the shortest). `hash` replaces a value by a keyed pseudonym: 32 hex digits, or
a code in the same range for an integer, which several values may share. Measurements in an
observation (a box) have no pseudonym: they can only be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias, get_args

from storage.spaces.descriptors import Discrete, MultiDiscrete, Space, Text
from storage.spaces.leaves import Leaf, leaves

Rule: TypeAlias = Literal["drop", "hash"]
RULES = get_args(Rule)
HASH_DIGITS = 32
"""Hex digits of a pseudonym. A text cannot be hashed unless at least half of them fit."""


def check_redaction(redact: Mapping[str, str], observation: Space) -> None:
    """Raise ValueError for an unknown path or rule, or a rule that the field does not allow."""
    if not isinstance(redact, Mapping):
        raise ValueError(f"redact: expected an object of paths, got {redact!r:.80}")
    for path, rule in redact.items():
        part, _, rest = path.partition(".")
        if part not in ("obs", "infos", "tags") or (not rest and "." in path):
            raise ValueError(f"redact: expected a path in obs, infos or tags, got {path!r:.80}")
        if rule not in RULES:
            raise ValueError(f"redact.{path}: expected drop or hash, got {rule!r:.80}")
        if part == "obs" and not list(_below(rest, observation)):
            known = ", ".join(leaf.column("obs") for leaf in leaves(observation))
            raise ValueError(f"redact.{path}: expected one of {known}")
        if part != "obs" and rule == "hash" and not rest:
            raise ValueError(f"redact.{path}: expected drop, or the name of a field to hash")
    for leaf, rule in leaf_rules(redact, observation):
        if rule == "hash" and not _has_pseudonyms(leaf):
            raise ValueError(
                f"redact.{leaf.column('obs')}: only integers (discrete) and texts with room for "
                f"{HASH_DIGITS // 2} to {HASH_DIGITS} hex digits can be hashed: drop it"
            )


def leaf_rules(redact: Mapping[str, str], observation: Space) -> list[tuple[Leaf, str]]:
    """The leaves of the observation with their rules, in canonical order; the longest path wins."""
    found: dict[str, tuple[Leaf, str]] = {}
    for path in sorted((one for one in redact if one.partition(".")[0] == "obs"), key=len):
        for leaf in _below(path.partition(".")[2], observation):
            found[leaf.path] = leaf, redact[path]
    return [found[leaf.path] for leaf in leaves(observation) if leaf.path in found]


def rules_for_earlier(
    earlier: Mapping[str, str], today: Mapping[str, str], observation: Space
) -> dict[str, str]:
    """The rules for episodes that began under an earlier declaration: its own and the current ones.

    `observation` is the earlier space. Of the current rules for observations, those apply whose
    field exists in it; a field that has no pseudonym in it is dropped.
    """
    found = dict(earlier)
    for path, rule in today.items():
        part, _, rest = path.partition(".")
        below = list(_below(rest, observation)) if part == "obs" else []
        if part == "obs" and not below:
            continue
        kept = rule == "drop" or all(_has_pseudonyms(leaf) for leaf in below)
        found[path] = rule if kept else "drop"
    dropped = tuple(f"{path}." for path, rule in today.items() if rule == "drop")
    return {path: rule for path, rule in found.items() if not path.startswith(dropped)}


def _below(path: str, space: Space) -> Iterator[Leaf]:
    for leaf in leaves(space):
        if not path or leaf.path == path or leaf.path.startswith(path + "."):
            yield leaf


def _has_pseudonyms(leaf: Leaf) -> bool:
    space = leaf.space
    if isinstance(space, Text):
        room = space.max_length >= HASH_DIGITS // 2 and space.min_length <= HASH_DIGITS
        return room and (not space.charset or set("0123456789abcdef") <= set(space.charset))
    return isinstance(space, (Discrete, MultiDiscrete))
