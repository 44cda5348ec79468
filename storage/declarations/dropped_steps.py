"""`dropped/{collector_id}.json`: how many steps clients report that they did not log.

A client whose queue is full drops steps and counts them. Dropped steps of episodes that had begun
leave a broken episode in the shards; of other episodes there is only this count. Jobs that judge
the log use it to say how much is missing. The file is replaced atomically and not synced. It
contains the totals of each client instance, so repeating a report changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from storage.objects.opening import Root, objects_at
from storage.system.formats import require_format

FOLDER = "dropped"


class Lost(NamedTuple):
    """What one client instance, or all of them, dropped."""

    episodes: int
    steps: int


def say_dropped(root: Root, collector_id: str, lost: Mapping[str, Lost]) -> None:
    """Replace the totals of a collector's client instances. Raises OSError."""
    name, data = f"{FOLDER}/{collector_id}.json", json.dumps(lost).encode() + b"\n"
    objects_at(root).replace(name, data, durable=False)


def read_dropped(root: Root, collector_id: str) -> dict[str, Lost]:
    """Client instance -> what it dropped; empty if there is no readable file.

    Raises NewerFormat.
    """
    objects, name = objects_at(root), f"{FOLDER}/{collector_id}.json"
    try:
        document = json.loads(objects.read(name))
        require_format(document, 1, f"{objects}/{name}")
        document.pop("format", None)
        return {name: Lost(int(counts[0]), int(counts[1])) for name, counts in document.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


def dropped_steps(root: Root) -> Lost:
    """The total that clients of all collectors of this root dropped."""
    names = objects_at(root).names(f"{FOLDER}/")
    ids = (one.rpartition("/")[2].removesuffix(".json") for one in names if one.endswith(".json"))
    found = [lost for one in ids for lost in read_dropped(root, one).values()]
    return Lost(sum(one.episodes for one in found), sum(one.steps for one in found))
