"""Compaction in a child process of a collector: `collect --compact`.

The child has the lowest priority for the processor, and is killed with the thread that started it.
It makes a plan and applies it, as `headrace compact --apply new` does. So it excludes, and is
excluded by, any other application of a plan; a later one finishes what a kill leaves half done.
"""

from __future__ import annotations

import os
from pathlib import Path

from storage.maintenance.compaction import plan_compaction, recorded_under
from storage.maintenance.plans import apply, save
from storage.wording import counted

NICE = 19


def compact_now(root: Path) -> str:
    """Compact the shards under a root with low priority; return what was done, "" for nothing."""
    os.nice(NICE)
    plan = plan_compaction(root, recorded_under(root))
    if not plan.steps:
        return ""
    save(root, plan)
    done = apply(root, plan, by="collect --compact", why="")
    old = sum(len(made.old) for made in done.made)
    left = "".join(f"; left {place}: {why}" for place, why in done.left.items())
    return (
        f"compaction joined {counted(old, 'shard')} to {len(done.made):,} and deleted "
        f"{counted(done.deleted, 'replaced shard')}{left}"
    )
