"""`flow/{policy_id}.json`: the version for which a collector's flow control holds clients.

A collector writes it once all steps that are closed by then are in shards. So a trainer that reads
shards under the same root learns, without a connection to the collector, that no more steps will
come before it publishes a newer version: it has to update with those that are there. The file is
only a hint: it is not synced, and a starting collector removes it.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from storage.declarations.declaration import check_policy_id
from storage.system.files import read_regular
from storage.system.formats import require_format

__all__ = ["held_version", "say_held"]

FLOW = "flow"


def say_held(root: Path, policy_id: str, version: int | None) -> None:
    """Record that a version has all its steps, and that they are in shards; None: no version has.

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
    """The version that waits for an update; None if there is none, or no readable file.

    Raises NewerFormat.
    """
    try:
        document = json.loads(read_regular(path := _path(root, policy_id)))
        require_format(document, 1, path)
        version = document["held_version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return version if isinstance(version, int) else None


def _path(root: Path, policy_id: str) -> Path:
    return root / FLOW / f"{check_policy_id(policy_id)}.json"
