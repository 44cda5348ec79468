"""`dropped/{collector_id}.json`: what clients told a collector that they did not log.

A client whose queue is full drops steps and counts them. Its episodes that had begun are in shards
as broken; of those that had not, nothing is but this count. Who judges the log asks how much of it
is missing. The file is replaced whole and not synced: totals of a client instance, so that the same
told again adds nothing.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from storage.system.files import read_regular

__all__ = ["Lost", "dropped_steps", "read_dropped", "say_dropped"]

FOLDER = "dropped"


class Lost(NamedTuple):
    """Of one client instance, or of all."""

    episodes: int
    steps: int


def say_dropped(root: Path, collector_id: str, lost: Mapping[str, Lost]) -> None:
    """Replace what is known of a collector's client instances. Raises OSError."""
    path = _path(root, collector_id)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.write_text(json.dumps(lost) + "\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_dropped(root: Path, collector_id: str) -> dict[str, Lost]:
    """Client instance -> what it dropped; nothing where nobody says so."""
    try:
        document = json.loads(read_regular(_path(root, collector_id)))
        return {name: Lost(int(told[0]), int(told[1])) for name, told in document.items()}
    except (OSError, ValueError, TypeError, AttributeError, IndexError):
        return {}


def dropped_steps(root: Path) -> Lost:
    """What clients of all collectors of this root did not log."""
    found = [
        told
        for path in sorted((root / FOLDER).glob("*.json"))
        for told in read_dropped(root, path.stem).values()
    ]
    return Lost(sum(one.episodes for one in found), sum(one.steps for one in found))


def _path(root: Path, collector_id: str) -> Path:
    return root / FOLDER / f"{collector_id}.json"
