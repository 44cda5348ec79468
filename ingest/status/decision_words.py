"""Decisions about candidates in words: for the terminal, the report and the status page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from storage.wording import counted

Document: TypeAlias = Mapping[str, Any]

LABELS = {
    "unsupported_actions": "actions in no judged step",
    "unsupported_near": "actions that were never logged nearby",
    "mean_weight": "mean importance weight",
    "largest_weight": "share of the largest weight",
    "heavy_tails": "share of the largest difference",
    "rewards_outside_range": "rewards outside the range",
    "in_lineage": "trained on",
    "lost_episodes": "abandoned or broken",
    "client_dropped": "dropped by clients",
    "without_tag": "without the tag",
    "lost_by_action": "lost by action",
    "no_propensity": "without a propensity",
    "not_finite": "with numbers beyond float32",
    "certain": "with probability 1",
    "no_density": "greedy in a continuous space",
    "nothing_reserved": "nothing held out",
    "sampled_log": "sampled logging",
    "no_episodes": "no episodes",
    "other_policy": "of another policy",
    "other_schema": "of other spaces",
    "tags": "with other tags",
    "time": "outside --since and --until",
    "before_live": "not newer than the live version's training",
    "first_tenth": "of the first tenth, which gave the cap",
    "wide_range": "width of the range, in those of the rewards",
    "reward_cap": "share of rewards above the cap",
    "candidates": "candidates judged by some of these",
    "cross_fit": "policies that judge their later rows",
    "training_disabled": "logged with training_enabled=False",
}
"""Words for names in JSON; in all other names, underscores are replaced by spaces."""
COMMANDS = {"canary start": "publish --canary", "canary": "promote", "rollback": "rollback"}
"""The command for each kind of decision; a decision without a kind is of `publish`."""
AT_LEAST = ("effective_sample_size", "reward_events")
"""Checks whose threshold is a minimum."""


def decided(one: Document) -> tuple[str, str, list[str]]:
    """A decision's command, its outcome, and the reasons."""
    command = COMMANDS.get(one.get("kind", ""), "publish")
    verdict, reasons = one["verdict"], one["reasons"]
    if verdict and reasons[:1] == ["without a gate"]:  # of a canary: it did not decide
        verdict, reasons = reasons[0], [f"its verdict was: {verdict}", *reasons[1:]]
    outcome = [verdict or ""]
    if one["published"]:
        outcome.append(f"live as version {one['version']}")
    elif one["verdict"]:
        outcome.append("not promoted" if command == "promote" else "not published")
    if one["episodes"]:
        outcome.append(f"{counted(one['episodes'], 'episode')}")
    if looks := one.get("looks"):
        outcome.append(counted(looks, "earlier look"))
    if others := one.get("others"):
        outcome.append(f"{counted(others, 'other candidate')} judged by some of them")
    reasons = [*map(in_words, reasons), *([f"by {one['by']}"] if one.get("by") else [])]
    ended = {"publish --canary": "started", "rollback": "the canary ended"}
    return command, ", ".join(filter(None, outcome)) or ended.get(command, "not judged"), reasons


def in_words(reason: str) -> str:
    """A reason without the name of its check, if its sentence includes that."""
    name, _, sentence = reason.partition(": ")
    check = name.removeprefix("live_")
    return sentence if check in LABELS or check in AT_LEAST else reason
