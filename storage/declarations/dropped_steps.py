"""`dropped/{collector_id}.json`: how many steps clients report that they did not log.

A client whose queue is full drops steps and counts them. Dropped steps of episodes that had begun
leave a broken episode in the shards; of other episodes there is only this count. Jobs that judge
the log use it to say how much is missing. The file is replaced atomically and not synced. It
contains the totals of each client instance, so repeating a report changes nothing.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from storage.system.files import read_regular
from storage.system.formats import require_format

__all__ = ["Lost", "dropped_steps", "read_dropped", "say_dropped"]

FOLDER = "dropped"


class Lost(NamedTuple):
    """What one client instance, or all of them, dropped."""

    episodes: int
    steps: int


def say_dropped(root: Path, collector_id: str, lost: Mapping[str, Lost]) -> None:
    """Replace the totals of a collector's client instances. Raises OSError."""
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
    """Client instance -> what it dropped; empty if there is no readable file.

    Raises NewerFormat.
    """
    try:
        document = json.loads(read_regular(path := _path(root, collector_id)))
        require_format(document, 1, path)
        document.pop("format", None)
        return {name: Lost(int(counts[0]), int(counts[1])) for name, counts in document.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


def dropped_steps(root: Path) -> Lost:
    """The total that clients of all collectors of this root dropped."""
    found = [
        lost
        for path in sorted((root / FOLDER).glob("*.json"))
        for lost in read_dropped(root, path.stem).values()
    ]
    return Lost(sum(one.episodes for one in found), sum(one.steps for one in found))


def _path(root: Path, collector_id: str) -> Path:
    return root / FOLDER / f"{collector_id}.json"
