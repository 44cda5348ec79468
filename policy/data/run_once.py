"""Jobs on a frozen data set, each done once, so that a scheduler can retry them.

A job that succeeds writes a record next to the manifest, `{hash}.{job}-{key}.json`; the key covers
all inputs of its result. A job holds a lock while it works. If two run at the same time, the
second one waits, finds the record, and does nothing. In a local folder, the kernel releases the
lock of a process that dies.

    frozen = freeze("run")
    trained = train_once("run", "default", BanditConfig(), frozen, seed=7)
    train_once("run", "default", BanditConfig(), frozen, seed=7)["unchanged"]     # True
    publish("run", "default", trained["candidate"], Gate(min_ess=100), frozen=frozen)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from policy.data.freeze import HASH_DIGITS, Frozen
from storage.objects.interface import Objects
from storage.system.formats import require_format
from storage.weights.manifest import canonical, sha256

Document: TypeAlias = dict[str, Any]


class DataIncomplete(ValueError):
    """Shards of a manifest could not be read; the text names them."""


def once(
    frozen: Frozen,
    job: str,
    key: Mapping[str, Any],
    work: Callable[[], Document],
    holds: Callable[[Document], bool] = lambda known: True,
) -> Document:
    """Return the record of a job if there is one; else call `work` and record its result.

    `key` has all inputs of the result other than the data. `holds` says whether the effect of a
    record still exists; if not, the job is done again. The returned dict also has `manifest` (the
    hash) and `unchanged` (whether it was recorded before).
    """
    folder = frozen.folder
    name = f"{frozen.hash}.{job}-{sha256(canonical(dict(key), job))[:HASH_DIGITS]}"
    with _alone(folder, f"{name}.lock"):
        known = _read(folder, f"{name}.json")
        if known is not None and holds(known):
            return {**known, "unchanged": True}
        done = {**work(), "manifest": frozen.hash}
        kept = {**done, _DIGEST: sha256(canonical(json.loads(canonical(done, job)), job))}
        text = json.dumps(kept, indent=1, allow_nan=False) + "\n"
        folder.replace(f"{name}.json", text.encode())
        return {**done, "unchanged": False}


@contextlib.contextmanager
def _alone(folder: Objects, name: str) -> Iterator[None]:
    """Hold a lock, which another job may hold for as long as it works."""
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(folder.exclusive(name))
                break
            except BlockingIOError:
                continue
        yield


def _read(folder: Objects, name: str) -> Document | None:
    """Read a record; None if there is none or it is damaged (the job is then done again).

    Raises NewerFormat.
    """
    try:
        document = json.loads(folder.read(name))
        if not isinstance(document, dict):
            return None
        require_format(document, 1, f"{folder}/{name}")
        digest = document.pop(_DIGEST, None)
        whole = digest is None or digest == sha256(canonical(document, name))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return document if whole else None


_DIGEST = "sha256"
"""The field with the digest of the others; records of release 0.1.0 have none."""


def require_all(frozen: Frozen, skipped: Mapping[str, str]) -> None:
    """Raise DataIncomplete if shards were skipped (name -> reason)."""
    if skipped:
        listed = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise DataIncomplete(
            f"manifest {frozen.hash}: expected all of its shards, but some could not be read: "
            f"{listed}"
        )
