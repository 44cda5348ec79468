"""The commands that change stored shards or copy roots: `compact`, `backup`, `restore`, `adopt`.

`compact` prints a plan and its digest, and changes nothing else. `--apply DIGEST` applies it.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.cli.options import LOCAL_ROOT, ROOT, Json, LocalRoot, Root
from headrace.cli.publishing import person
from headrace.cli.roots import require_root


def compact(
    root: Root = ROOT,
    megabytes: Annotated[
        float, "Largest size of a compacted shard, in MB.", Meta(ge=0.001)
    ] = 128.0,
    hours: Annotated[
        float | None, "Join only shards whose steps began in the same N hours.", Meta(ge=0.001)
    ] = None,
    grace_hours: Annotated[
        float, "Hours until a replaced shard may be deleted.", Meta(ge=0.0)
    ] = 24.0,
    apply: Annotated[
        str | None,
        "Apply a plan; `new` makes one and applies it.",
        Meta(extra={"metavar": "<digest>"}),
    ] = None,
    why: Annotated[str, "Reason, kept in the records."] = "",
    as_json: Json = False,
) -> None:
    """Join small shards, so that reading them is fast; delete shards that were replaced before.

    Without --apply the plan is printed, and written to maintenance/. It can be applied beside
    collectors, trainers and other readers, and again after an interruption.
    """
    require_root(root)
    from headrace.output import console, results
    from storage.maintenance import plans
    from storage.maintenance.compaction import plan_compaction, recorded_under

    if apply in (None, "new"):
        plan = plan_compaction(
            root,
            recorded_under(root),
            aim_bytes=int(megabytes * 1_000_000),
            period_seconds=None if hours is None else hours * 3600,
            grace_seconds=grace_hours * 3600,
        )
        if plan.steps:
            plans.save(root, plan)
    else:
        plan = plans.load(root, apply)
    merges = [step for step in plan.steps if isinstance(step, plans.Merge)]
    document: dict[str, Any] = {
        "plan": plan.digest if plan.steps else None,
        "merges": [
            {"stream": s.stream, "shards": len(s.shards), "rows": s.rows, "bytes": s.nbytes}
            for s in merges
        ],
        "deletes": sum(len(s.shards) for s in plan.steps if isinstance(s, plans.Delete)),
    }
    if apply is not None:
        with console.progress() as progress:
            done = plans.apply(root, plan, by=person(), why=why, on_progress=progress)
        made = [msgspec.to_builtins(one) | {"old": len(one.old)} for one in done.made]
        document["applied"] = {"made": made, "deleted": done.deleted, "left": done.left}
    return console.line(document) if as_json else results.compacted(document, str(root))


def backup(
    target: Annotated[
        Path, "New folder, or that of an earlier backup.", Meta(extra={"argument": True})
    ],
    root: LocalRoot = LOCAL_ROOT,
    as_json: Json = False,
) -> None:
    """Copy a root, also while its collector runs; later backups copy only what is new."""
    require_root(str(root))
    from headrace.output import console, results
    from ingest.backup import backup as copy

    with console.progress() as progress:
        document = asdict(copy(root, target, on_progress=progress))
    return console.line(document) if as_json else results.copied(document, str(target))


def restore(
    source: Annotated[Path, "Folder of a backup.", Meta(extra={"argument": True})],
    root: LocalRoot = LOCAL_ROOT,
    as_json: Json = False,
) -> None:
    """Copy a backup to a new root, whose collector then takes a new id."""
    from headrace.output import console, results
    from ingest.backup import restore as copy

    with console.progress() as progress:
        done = copy(source, root, on_progress=progress)
    document = {**asdict(done), "adopted": done.adopted and msgspec.to_builtins(done.adopted)}
    return console.line(document) if as_json else results.copied(document, str(root))


def adopt(root: LocalRoot = LOCAL_ROOT, as_json: Json = False) -> None:
    """Record the shards that are later than the journal of a root, as after a restore.

    It ends the episodes that were open in the journal, stores their steps, and gives the collector
    a new id. The collector must be stopped.
    """
    require_root(str(root))
    from headrace.output import console, results
    from ingest.backup import adopt_root

    done = adopt_root(root)
    document = {"adopted": done and msgspec.to_builtins(done)}
    return console.line(document) if as_json else results.adopted(document)
