"""`late/{collector_id}.json`: how many rewards came after their step's window had closed.

The collector refuses such a reward (`window_closed`), so the step keeps the reward that it had.
Jobs that judge the log use the numbers to say how much is missing. The file is replaced atomically
and not synced. It contains rows of policy, version, delay, action and number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from storage.objects.opening import Root, objects_at
from storage.system.formats import require_format

FOLDER = "late"

DELAYS = {60.0: "a minute", 3600.0: "an hour", 86_400.0: "a day"}
"""Seconds between a step and its reward -> the word for at most that."""


class LateReward(NamedTuple):
    """A kind of late reward."""

    policy_id: str
    version: int  # of the policy that acted; -1 if it is unknown
    delay: str  # at most "a minute", "an hour", "a day"; "longer" or "unknown"
    action: int | None  # of a Discrete space, while its episode is open


def delay_of(seconds: float | None) -> str:
    """The word for the time between a step and its reward."""
    if seconds is None:
        return "unknown"
    return next((word for most, word in DELAYS.items() if seconds <= most), "longer")


def say_late(root: Root, collector_id: str, late: Mapping[LateReward, int]) -> None:
    """Replace a collector's numbers. Raises OSError."""
    rows = [[*kind, number] for kind, number in late.items()]
    data = json.dumps({"format": 1, "late": rows}).encode() + b"\n"
    objects_at(root).replace(f"{FOLDER}/{collector_id}.json", data, durable=False)


def read_late(root: Root, collector_id: str) -> Counter[LateReward]:
    """Kind -> number of a collector; empty if there is no readable file.

    Raises NewerFormat.
    """
    objects, name = objects_at(root), f"{FOLDER}/{collector_id}.json"
    try:
        document = json.loads(objects.read(name))
        require_format(document, 1, f"{objects}/{name}")
        return Counter(
            {
                LateReward(
                    str(policy), int(version), str(delay), None if action is None else int(action)
                ): int(number)
                for policy, version, delay, action, number in document["late"]
            }
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return Counter()


def late_rewards(root: Root, policy_id: str) -> Counter[LateReward]:
    """Kind -> number of a policy's late rewards, of all collectors of this root."""
    names = objects_at(root).names(f"{FOLDER}/")
    ids = (one.rpartition("/")[2].removesuffix(".json") for one in names if one.endswith(".json"))
    found: Counter[LateReward] = Counter()
    for one in ids:
        found.update(read_late(root, one))
    return Counter({kind: n for kind, n in found.items() if kind.policy_id == policy_id})
