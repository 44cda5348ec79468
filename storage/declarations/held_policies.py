"""`flow/{policy_id}.json`: the version for which a collector's flow control holds clients.

A collector writes it once all steps that are closed by then are in shards. So a trainer that reads
shards under the same root learns, without a connection to the collector, that no more steps will
come before it publishes a newer version: it has to update with those that are there. The file is
only a hint: it is not synced, and a starting collector removes it.
"""

from __future__ import annotations

import json

from storage.declarations.declaration import check_policy_id
from storage.objects.opening import Root, objects_at
from storage.system.formats import require_format

FLOW = "flow"


def say_held(root: Root, policy_id: str, version: int | None) -> None:
    """Record that a version has all its steps, and that they are in shards; None: no version has.

    Raises OSError.
    """
    objects, name = objects_at(root), _name(policy_id)
    if version is not None or objects.status(name) is not None:
        data = json.dumps({"held_version": version}).encode() + b"\n"
        objects.replace(name, data, durable=False)


def held_version(root: Root, policy_id: str) -> int | None:
    """The version that waits for an update; None if there is none, or no readable file.

    Raises NewerFormat.
    """
    objects, name = objects_at(root), _name(policy_id)
    try:
        document = json.loads(objects.read(name))
        require_format(document, 1, f"{objects}/{name}")
        version = document["held_version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return version if isinstance(version, int) else None


def _name(policy_id: str) -> str:
    return f"{FLOW}/{check_policy_id(policy_id)}.json"
