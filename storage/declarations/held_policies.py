"""`flow/{policy_id}.json`: which version a collector's flow control holds.

A collector writes it once all steps that were closed by then are in shards, so that who reads them
under the same root learns that no more will come before a newer version: an update is due with what
is there. No connection between the two is needed. It is no more than a hint of this moment: it is
not synced, and a collector that starts takes it back.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from storage.declarations.declaration import check_policy_id
from storage.system.files import read_regular

__all__ = ["held_version", "say_held"]

FLOW = "flow"


def say_held(root: Path, policy_id: str, version: int | None) -> None:
    """Say that a version has its steps, and that all of them are in shards; None: none has.

    Raises OSError.
    """
    path = _path(root, policy_id)
    if version is None and not path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.write_text(json.dumps({"held_version": version}) + "\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def held_version(root: Path, policy_id: str) -> int | None:
    """The version that waits for an update; None when none does, or nobody says so."""
    try:
        document = json.loads(read_regular(_path(root, policy_id)))
        version = document["held_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def _path(root: Path, policy_id: str) -> Path:
    return root / FLOW / f"{check_policy_id(policy_id)}.json"
