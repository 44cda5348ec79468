"""Which schema a job reads of a policy whose spaces were changed, and what it leaves out for that.

A job reads one schema: the one that is asked for, else that of the spaces which the policy is
declared with. Its rows have to fit the spaces that are learned or judged. What is left out for that
is counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

from storage.declarations.policy_files import load_declarations
from storage.experience.range_set import RangeSet
from storage.reading.exclusion import Reason
from storage.reading.sources import DirectorySource, ScanIncomplete
from storage.shards.names import ShardDamaged
from storage.shards.shard import rows_of_policy
from storage.spaces.descriptors import Discrete, MultiDiscrete, Space, schema_id
from storage.spaces.leaves import bounds_of, describe, leaves

__all__ = ["OTHER_SCHEMA", "in_other_schemas", "require_fit", "schema_to_read"]

OTHER_SCHEMA: Reason = "other_schema"
OTHER_POLICY: Reason = "other_policy"


def schema_to_read(root: Path | str, policy_id: str, asked: str | None = None) -> str | None:
    """The schema that is asked for, else the declared one; None where there is neither."""
    declared = load_declarations(root).get(policy_id)
    return asked if asked is not None or declared is None else declared.schema_id


def in_other_schemas(root: Path | str, policy_id: str, read: str | None) -> Counter[Reason]:
    """Rows in shards of other schemas than `read`, by why they are left out: OTHER_SCHEMA those of
    the policy, OTHER_POLICY the rest.

    What cannot be read now is not counted.
    """
    rows: Counter[Reason] = Counter()
    if read is None:
        return rows
    known: dict[str, RangeSet] = {}
    with DirectorySource(root) as source:
        try:
            shards = source.scan()
        except ScanIncomplete as incomplete:
            shards = incomplete.found
    for shard in shards:
        ranges = known.setdefault(shard.stream, RangeSet())
        if shard.schema_id == read or ranges.contains_range(shard.first, shard.last):
            continue
        with contextlib.suppress(ShardDamaged, OSError):
            mine, all_rows = rows_of_policy(Path(shard.place), policy_id)
            rows.update({OTHER_SCHEMA: mine, OTHER_POLICY: all_rows - mine})
            ranges.add_range(shard.first, shard.last)
    return +rows


def require_fit(stored: tuple[Space, Space], wanted: tuple[Space, Space]) -> None:
    """Raise ValueError unless rows of the spaces `stored` are rows of those `wanted`: (observation,
    action) each.

    Columns are of the same type and shape, choices among the wanted ones, and names have the same
    codes; the bounds of numbers may differ.
    """
    if stored == wanted:
        return
    for what, have, want in zip(("observation", "action"), stored, wanted, strict=True):
        found = {leaf.path: leaf for leaf in leaves(have)}
        for leaf in leaves(want):
            old = found.pop(leaf.path, None)
            if old is None or not _fits(old, leaf):
                place = f"{what}.{leaf.path}" if leaf.path else what
                said = "none" if old is None else describe(old.space)
                raise ValueError(
                    f"schema {schema_id(*stored)}: {place}: expected {describe(leaf.space)}, as "
                    f"schema {schema_id(*wanted)} has it, got {said}"
                )
        if found:
            raise ValueError(
                f"schema {schema_id(*stored)}: {what}: expected no {', '.join(found)}, which "
                f"schema {schema_id(*wanted)} has not"
            )


def _fits(old: Any, new: Any) -> bool:
    """Whether a leaf's values are values of another leaf."""
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
