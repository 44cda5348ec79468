"""Jobs on a frozen data set, each done once: what a scheduler may retry at will.

Beside its manifest every job keeps a record, `{hash}.{job}-{key}.json`, written when it succeeded;
the key covers all that its result depends on. A job holds a lock while it works, which the kernel
drops when the process dies: of two that run at once the second waits, finds the record, and does
nothing.

    frozen = freeze("run")
    trained = train_once("run", "default", BanditConfig(), frozen, seed=7)
    train_once("run", "default", BanditConfig(), frozen, seed=7)["unchanged"]     # True
    publish("run", "default", trained["candidate"], Gate(min_ess=100), frozen=frozen)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from policy.jobs.freeze import HASH_DIGITS, Frozen
from storage.system.files import FileLock, make_directory, replace_file
from storage.weights.manifest import canonical, sha256

__all__ = ["DataIncomplete", "Document", "once", "require_all"]

Document: TypeAlias = dict[str, Any]


class DataIncomplete(ValueError):
    """Shards of the manifest could not be read; the text names them."""


def once(
    frozen: Frozen,
    job: str,
    key: Mapping[str, Any],
    work: Callable[[], Document],
    holds: Callable[[Document], bool] = lambda known: True,
) -> Document:
    """The record of a job, or what `work` gives, recorded; with `manifest` and `unchanged`.

    `key` is all that the result depends on beside the data; `holds` says whether a record's effect
    is still there.
    """
    name = f"{frozen.hash}.{job}-{sha256(canonical(dict(key), job))[:HASH_DIGITS]}"
    folder = frozen.path.parent
    make_directory(folder)
    path = folder / f"{name}.json"
    with FileLock(folder / f".{name}.lock"):
        known = _read(path)
        if known is not None and holds(known):
            return {**known, "unchanged": True}
        done = {**work(), "manifest": frozen.hash}
        replace_file(path, json.dumps(done, indent=1, allow_nan=False).encode() + b"\n")
        return {**done, "unchanged": False}


def _read(path: Path) -> Document | None:
    """A record; None when there is none, or one that is no record (it is then made anew)."""
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def require_all(frozen: Frozen, skipped: Mapping[str, str]) -> None:
    """Raises DataIncomplete when a shard (name -> why) was left out."""
    if skipped:
        listed = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise DataIncomplete(f"manifest {frozen.hash}: shards could not be read: {listed}")
