"""The commands that change stored shards or copy roots.

`compact`, `retain` and `erase` print a plan and its digest, and change nothing else; `--apply
DIGEST` applies it. `backup` and `restore` copy roots, and `adopt` makes an older journal current.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import Meta

from headrace.cli.options import LOCAL_ROOT, ROOT, Ca, Json, LocalRoot, Root
from headrace.cli.publishing import person
from headrace.cli.roots import require_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.maintenance.plans import MaintenancePlan
    from storage.maintenance.removal import Requests


Apply = Annotated[
    str | None,
    "Apply a plan; `new` makes one and applies it.",
    Meta(extra={"metavar": "<digest>"}),
]
Why = Annotated[str, "Reason, kept in the records."]
Grace = Annotated[float, "Hours until a replaced shard may be deleted.", Meta(ge=0.0)]
Where = Annotated[
    str | None,
    "Episodes with a step for which this holds; columns as in the shards, such as ts, policy_id, "
    "source, tags. Needs headrace[import].",
    Meta(extra={"metavar": "<sql>"}),
]


EpisodeIds = Annotated[
    list[str] | None, "An episode. May be repeated.", Meta(extra={"metavar": "<id>"})
]
Tags = Annotated[
    list[str] | None,
    "Episodes with a tag. May be repeated.",
    Meta(extra={"metavar": "<key=value>"}),
]
RequestFile = Annotated[
    Path | None, "File of requests, one a line: an episode's id, or tag:key=value."
]
Queue = Annotated[
    Path | None,
    "Folder of files of requests (*.txt): erase all, then replace each by its proof in done/.",
]
YesAll = Annotated[bool, "Erase even if nothing would be left."]
WithDamaged = Annotated[bool, "Also erase what cannot be read, in quarantine or replaced."]
OnlyProof = Annotated[bool, "Only look for the names, and change nothing."]
Also = Annotated[
    list[Path] | None, "A folder that is searched, too, such as a spool. May be repeated."
]
EraseToken = Annotated[str | None, "Token with scopes admin and erase, for a running collector."]


def compact(
    root: Root = ROOT,
    megabytes: Annotated[
        float, "Largest size of a compacted shard, in MB.", Meta(ge=0.001)
    ] = 128.0,
    hours: Annotated[
        float | None, "Join only shards whose steps began in the same N hours.", Meta(ge=0.001)
    ] = None,
    grace_hours: Grace = 24.0,
    apply: Apply = None,
    why: Why = "",
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

    plan = _planned(
        *(root, "compact", apply),
        lambda: plan_compaction(
            root,
            recorded_under(root),
            aim_bytes=int(megabytes * 1_000_000),
            period_seconds=None if hours is None else hours * 3600,
            grace_seconds=grace_hours * 3600,
        ),
    )
    merges = [step for step in plan.steps if isinstance(step, plans.Merge)]
    document: dict[str, Any] = {
        "plan": plan.digest if plan.steps else None,
        "merges": [
            {"stream": s.stream, "shards": len(s.shards), "rows": s.rows, "bytes": s.nbytes}
            for s in merges
        ],
        "deletes": _deletes(plan),
    }
    if apply is not None:
        document["applied"] = _applied(root, plan, why)
    return console.line(document) if as_json else results.compacted(document, str(root))


def _planned(
    root: Root, command: str, apply: str | None, make: Callable[[], MaintenancePlan]
) -> MaintenancePlan:
    """The plan of a digest, or a new one, which is kept if it changes anything."""
    from storage.maintenance import plans

    if apply not in (None, "new"):
        return plans.load(root, apply, command)
    plan = make()
    if plan.steps or plan.tombstones:
        plans.save(root, plan)
    return plan


def _applied(root: Root, plan: MaintenancePlan, why: str) -> dict[str, Any]:
    """Apply a plan; what that has done."""
    from headrace.output import console
    from storage.maintenance import plans

    with console.progress() as progress:
        done = plans.apply(root, plan, by=person(), why=why, on_progress=progress)
    made = [msgspec.to_builtins(one) | {"old": len(one.old)} for one in done.made]
    counts = {"deleted": done.deleted, "removed": done.removed, "left": done.left}
    return {"made": made, **counts}


def retain(
    root: Root = ROOT,
    keep: Annotated[
        str | None,
        "Remove episodes whose latest step is older: 400d.",
        Meta(extra={"metavar": "<days>"}),
    ] = None,
    max_bytes: Annotated[
        int | None, "Remove the oldest episodes until the shards have this size.", Meta(ge=0)
    ] = None,
    where: Where = None,
    cap_bytes: Annotated[
        int | None, "Remove at most about this much in one plan, the oldest first.", Meta(ge=0)
    ] = None,
    grace_hours: Grace = 24.0,
    apply: Apply = None,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """Remove whole episodes from the shards: old ones, those beyond a size, those that SQL names.

    Only episodes whose end is in a shard are removed, with those that they continue. Replaced
    shards stay for the grace period. Without --apply the plan is printed, as by `compact`.
    """
    require_root(root)
    from headrace.output import console, results
    from storage.maintenance.compaction import recorded_under
    from storage.maintenance.removal import plan_retention

    if apply in (None, "new") and (keep, max_bytes, where) == (None, None, None):
        raise ValueError("retain: expected --keep, --max-bytes or --where")
    with console.progress() as progress:
        plan = _planned(
            *(root, "retain", apply),
            lambda: plan_retention(
                root,
                recorded_under(root),
                keep_days=None if keep is None else _days(keep),
                max_bytes=max_bytes,
                where=where,
                cap_bytes=cap_bytes,
                grace_seconds=grace_hours * 3600,
                on_progress=progress,
            ),
        )
    document = _removals(plan)
    if apply is not None:
        document["applied"] = _applied(root, plan, why)
    return console.line(document) if as_json else results.removed(document, str(root))


def _days(text: str) -> float:
    number = text.removesuffix("d")
    try:
        days = float(number)
    except ValueError:
        days = -1.0
    if not 0.0 <= days < 1e6 or number == text:
        raise ValueError(f"--keep: expected days, such as 400d, got {text!r:.40}")
    return days


def _removals(plan: MaintenancePlan) -> dict[str, Any]:
    """What a plan removes, in numbers."""
    from storage.maintenance import plans

    steps = [step for step in plan.steps if isinstance(step, plans.Remove)]
    return {
        "command": plan.command,
        "plan": plan.digest if plan.steps or plan.tombstones else None,
        "rows": sum(step.rows for step in steps),
        "whole_shards": sum(step.rows == step.of_rows for step in steps),
        "rewritten_shards": sum(step.rows < step.of_rows for step in steps),
        "deletes": _deletes(plan),
        "discards": [s.place for s in plan.steps if isinstance(s, plans.Discard)],
    }


def _deletes(plan: MaintenancePlan) -> int:
    from storage.maintenance import plans

    return sum(len(step.shards) for step in plan.steps if isinstance(step, plans.Delete))


def erase(
    root: LocalRoot = LOCAL_ROOT,
    episode: EpisodeIds = None,
    tag: Tags = None,
    requests: RequestFile = None,
    queue: Queue = None,
    where: Where = None,
    yes_all: YesAll = False,
    with_damaged: WithDamaged = False,
    proof: OnlyProof = False,
    also: Also = None,
    apply: Apply = None,
    why: Why = "",
    token: EraseToken = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Erase whole episodes from journal, shards, quarantine and replaced shards, at once.

    Without --apply the plan is printed: it names no person. After it is applied with the same
    requests, names are looked for everywhere, as --proof does; status 1 says that some are left.
    """
    require_root(root)
    from headrace.output import console, results
    from ingest.access.key_files import redaction_key
    from ingest.erasure import command
    from ingest.verification import journal_account
    from storage.maintenance import plans
    from storage.maintenance.removal import plan_erasure
    from storage.maintenance.search import search
    from storage.weights.decisions import without_texts

    queued = {} if queue is None else _queued(queue, root, apply)
    files = [*queued, *([] if requests is None else [requests])]
    wanted = _requests(episode, tag, files)
    if proof and not wanted.texts:
        raise ValueError("--proof: expected --episode, --tag or --requests")
    if not (wanted.texts or where or apply not in (None, "new")):
        raise ValueError("erase: expected --episode, --tag, --requests or --where")
    if any(text in why for text in wanted.texts):
        raise ValueError("--why: expected a reason without what is to be erased: it is kept")
    for folder in (missing for missing in also or () if not missing.is_dir()):
        raise ValueError(f"--also: expected a folder, found none at {folder}")
    folders, document = [root, *(also or [])], dict[str, Any]()
    key = redaction_key(root)
    with console.progress() as progress:
        if apply in (None, "new") and not proof:
            marks = [*wanted.marks(key)]
            found = plan_erasure(
                *(root, journal_account(root, token=token, ca=ca), marks, key),
                where=where,
                all_rows=yes_all,
                with_damaged=with_damaged,
                on_progress=progress,
            )
            document = _removals(found.plan) | {
                "episodes": found.episodes,
                "trained": found.trained,
                "unmatched": [n for n, mark in enumerate(marks, 1) if mark in found.unmatched],
            }
            digest = plans.save(root, found.plan)
            apply = apply and digest
        if apply is not None and not proof:
            plan = plans.load(root, apply, "erase")
            document = _removals(plan) | document
            document["applied"] = command.erase(
                root, plan, key, token=token, ca=ca, by=person(), why=why, on_progress=progress
            )
        if wanted.texts and "applied" in document:
            document["decisions"] = without_texts(root, wanted.texts)
        if proof or (wanted.texts and "applied" in document):
            document["proof"] = search(folders, wanted.texts, on_progress=progress).to_dict()
    looked = document.get("proof", {"clear": True})
    if looked["clear"]:
        document |= {} if queue is None else {"done": _replaced_by_proofs(queued, document)}
    console.line(document) if as_json else results.erased(document, str(root))
    done = document.get("applied", {"removed": 1})
    if not (looked["clear"] and (queue or done["removed"] or done["ended"] or done["repeated"])):
        raise typer.Exit(1)


def _queued(queue: Path, root: Path, apply: str | None) -> dict[Path, object]:
    """The files of a queue, with their states. Raises NothingYet without any."""
    from storage.errors import NothingYet

    if apply != "new":
        raise ValueError("--queue: expected --apply new")
    if not queue.is_dir() or queue.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"--queue: expected a folder outside of the root, got {queue}")
    found = {one: _state(one) for one in sorted(queue.glob("*.txt")) if one.is_file()}
    if not found:
        raise NothingYet(f"{queue}: no request (*.txt) waits")
    return found


def _state(file: Path) -> object:
    """What changes if a file is written; None if it is gone."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _replaced_by_proofs(files: dict[Path, object], document: dict[str, Any]) -> list[str]:
    """Delete requests, which name persons, each once its proof is durable in done/.

    A file that was written meanwhile may name more persons: it waits for the next run.
    """
    from storage.system.files import replace_file

    done = []
    for file, state in files.items():
        if _state(file) not in (state, None):
            print(f"{file}: written meanwhile; the next run reads it again", file=sys.stderr)
            continue
        folder = file.parent / "done"
        folder.mkdir(exist_ok=True)
        proof, known = folder / f"{file.name}.proof.json", 1
        while proof.exists():  # of an earlier file with this name
            known += 1
            proof = folder / f"{file.name}.{known}.proof.json"
        replace_file(proof, (json.dumps(document, indent=1) + "\n").encode())
        file.unlink(missing_ok=True)
        done.append(str(proof))
    return done


def _requests(episodes: list[str] | None, tags: list[str] | None, files: list[Path]) -> Requests:
    from storage.maintenance.removal import Requests, parse_tag, read_requests

    names = list(episodes or ())
    pairs = [parse_tag(text, "--tag") for text in tags or []]
    for file in files:
        try:
            more = read_requests(file.read_text(encoding="utf-8-sig").splitlines(), str(file))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected text in UTF-8: {error}") from error
        names, pairs = [*names, *more.episodes], [*pairs, *more.tags]
    return Requests(tuple(names), tuple(pairs))


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
