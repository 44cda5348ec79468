"""`history/{policy_id}.json`: rewards over time by version, as sums, written by the collector.

The file is replaced atomically after each shard, and not synced. It outlives the shards, whose rows
may be retained out or erased: it has no rows and no names. `headrace report` reads the shards.
"""

from __future__ import annotations

import json
import logging

from storage.experience.reward_history import RewardHistory
from storage.objects.opening import Root, objects_at
from storage.system.formats import require_format

log = logging.getLogger("headrace.collector")


def say_history(root: Root, policy_id: str, history: RewardHistory) -> None:
    """Replace a policy's history. Raises OSError."""
    objects_at(root).replace(_name(policy_id), history.to_json(), durable=False)


def read_history(root: Root, policy_id: str) -> RewardHistory:
    """A policy's history; an empty one if there is no file, or a damaged one, which is logged.

    Raises NewerFormat.
    """
    objects = objects_at(root)
    try:
        data = objects.read(_name(policy_id))
        require_format(json.loads(data), 1, f"{objects}/{_name(policy_id)}")
        return RewardHistory.from_json(data)
    except FileNotFoundError:
        return RewardHistory()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        log.warning("%s/%s cannot be read and begins anew: %s", objects, _name(policy_id), error)
        return RewardHistory()


def _name(policy_id: str) -> str:
    return f"history/{policy_id}.json"
