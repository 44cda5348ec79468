"""The schema that a job reads, for policies whose spaces have changed.

A job reads one schema: the given one, else the policy's declared one. Its rows must fit the spaces
of the weights that are trained or judged. Rows of other schemas are left out and counted. Of the
episodes of that schema, training and evaluation read different ones.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from storage.declarations.policy_files import load_declarations
from storage.experience.range_set import RangeSet
from storage.objects.opening import Root
from storage.reading.exclusion import Reason
from storage.reading.objects_source import source_at
from storage.reading.sources import ScanIncomplete
from storage.shards.names import ShardDamaged
from storage.shards.shard import rows_of_policy
from storage.spaces.descriptors import Discrete, MultiDiscrete, Space, schema_id
from storage.spaces.leaves import bounds_of, describe, leaves

OTHER_SCHEMA: Reason = "other_schema"
OTHER_POLICY: Reason = "other_policy"
HELD_OUT = 0.3
"""The share of episodes that training reserves for evaluation by default."""


def schema_to_read(root: Root, policy_id: str, asked: str | None = None) -> str | None:
    """`asked` if it is given, else the declared schema; None if there is neither."""
    declared = load_declarations(root).get(policy_id)
    return asked if asked is not None or declared is None else declared.schema_id


def never_stored(root: Root, policy_id: str, asked: str | None) -> str:
    """Why no later episode will have the schema `asked`: "" if one may, or if none is asked for.

    A policy that is not declared yet may get any schema.
    """
    declared = schema_to_read(root, policy_id)
    if asked is None or declared in (None, asked):
        return ""
    return f". The policy is declared with schema {declared}, not {asked}"


def in_other_schemas(root: Root, policy_id: str, read: str | None) -> Counter[Reason]:
    """Count the rows in shards of other schemas than `read`.

    The policy's rows count as OTHER_SCHEMA, others as OTHER_POLICY. Shards that cannot be read are
    not counted.
    """
    rows: Counter[Reason] = Counter()
    if read is None:
        return rows
    known: dict[str, RangeSet] = {}
    source = source_at(root)
    try:
        shards = source.scan()
    except ScanIncomplete as incomplete:
        shards = incomplete.found
    for shard in shards:
        ranges = known.setdefault(shard.stream, RangeSet())
        if shard.schema_id == read or ranges.contains_range(shard.first, shard.last):
            continue
        with contextlib.suppress(ShardDamaged, OSError):
            mine, all_rows = rows_of_policy(source.open(shard), policy_id)
            rows.update({OTHER_SCHEMA: mine, OTHER_POLICY: all_rows - mine})
            ranges.add_range(shard.first, shard.last)
    return +rows


def require_fit(stored: tuple[Space, Space], wanted: tuple[Space, Space]) -> None:
    """Raise ValueError unless rows of the `stored` spaces fit the `wanted` ones.

    Both are (observation, action). Columns must have the same type and shape, choices must be among
    the wanted ones, and names must have the same codes; the bounds of numbers may differ.
    """
    if stored == wanted:
        return
    for what, have, want in zip(("observation", "action"), stored, wanted, strict=True):
        found = {leaf.path: leaf for leaf in leaves(have)}
        for leaf in leaves(want):
            old = found.pop(leaf.path, None)
            if old is None or not _fits(old, leaf):
                place = f"{what}.{leaf.path}" if leaf.path else what
                actual = "none" if old is None else describe(old.space)
                raise ValueError(
                    f"schema {schema_id(*stored)}: {place}: expected {describe(leaf.space)}, as "
                    f"schema {schema_id(*wanted)} has it, got {actual}"
                )
        if found:
            raise ValueError(
                f"schema {schema_id(*stored)}: {what}: expected only the parts of schema "
                f"{schema_id(*wanted)}, got {', '.join(found)} too"
            )


def _fits(old: Any, new: Any) -> bool:
    """Whether the values of a leaf are also values of another leaf."""
    if type(old.space) is not type(new.space):
        return False
    if old.is_text or (old.dtype, old.shape) != (new.dtype, new.shape):
        return bool(old.is_text)
    if isinstance(new.space, Discrete) and new.space.names[: old.space.n] != old.space.names:
        return False
    have, want = bounds_of(old.space), bounds_of(new.space)
    if isinstance(new.space, (Discrete, MultiDiscrete)) and have and want:
        return bool((have[0] >= want[0]).all() and (have[1] <= want[1]).all())
    return True
