"""A log with each kind of ending, written as shards, and the runs that an export has to find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policy.data.log_selection import LogSelection
from storage.experience.sample_batch import SampleBatch
from storage.shards.output_writer import ParquetOutputWriter
from storage.spaces.descriptors import Box, Dict, Discrete

CHOICES, VECTORS = "choices", "vectors"
SPACES = {
    CHOICES: (Box((2,), low=-9, high=9), Discrete(3)),
    VECTORS: (Dict((("place", Box((2,))), ("load", Box((1,))))), Box((2,), low=-1, high=1)),
}
STEPS = {"over": 5, "cut": 4, "open": 6, "lost": 3, "gap": 5}
"""Ended; cut off with a final observation; still open, in two parts; cut off without a final
observation; t without 3 and 4."""


@dataclass
class Expected:
    """A run: observations with the final one, which is NaN where it is not known."""

    name: str
    obs: Any  # (T + 1, 2)
    actions: Any
    rewards: Any
    logp: Any
    terminated: bool

    def with_next(self) -> Expected | None:
        """Without the last step if it leads nowhere known."""
        if not np.isnan(self.obs[-1]).any():
            return self
        keep = len(self.rewards) - 1
        if not keep:
            return None
        parts = (self.actions[:keep], self.rewards[:keep], self.logp[:keep])
        return Expected(self.name, self.obs[:-1], *parts, False)


def selection(root: Path, policy_id: str = CHOICES, **changes: Any) -> LogSelection:
    given = {"since": None, "until": None, "manifest": None, "schema_id": None, "retry_for": 1.0}
    return LogSelection(root=root, policy_id=policy_id, **{**given, **changes})


def write_log(
    root: Path, policy_id: str = CHOICES, repeats: int = 1, kinds: Mapping[str, int] = STEPS
) -> list[Expected]:
    """Write `repeats` episodes of each kind, with its steps, and return their runs."""
    rng = np.random.default_rng(1)
    writer = ParquetOutputWriter(root, {policy_id: SPACES[policy_id]})
    found: list[Expected] = []
    for repeat in range(repeats):
        for kind, steps in kinds.items():
            found += _episode(writer, policy_id, f"{kind}{repeat}", kind, steps, rng)
    return found


def _episode(
    writer: Any, policy_id: str, name: str, kind: str, steps: int, rng: Any
) -> list[Expected]:
    obs = rng.normal(size=(steps + 1, 2)).astype(np.float32)
    choices = policy_id == CHOICES
    actions = rng.integers(0, 3, steps) if choices else rng.uniform(-1, 1, (steps, 2))
    actions = actions if choices else actions.astype(np.float32)
    rewards = rng.normal(size=steps).astype(np.float32).astype(np.float64)
    logp = np.log(rng.uniform(0.1, 0.9, steps))
    t = np.arange(steps)
    known = np.ones(steps, bool)
    if kind == "gap":
        t[3:] += 2
        known[2] = False
    known[-1] = kind in ("over", "cut", "gap")
    terminated = (t == t[-1]) & (kind in ("over", "gap"))
    load = np.arange(steps + 1, dtype=np.float32)[:, None]
    columns = {
        **_observed("obs", obs[:-1], load[:-1], choices),
        **_observed("new_obs", obs[1:], load[1:], choices),
        "actions": actions,
        "rewards": rewards,
        "action_logp": logp,
        "terminateds": terminated,
        "truncateds": (t == t[-1]) & (kind in ("cut", "lost")),
        "has_new_obs": known,
        "eps_id": np.full(steps, name, object),
        "policy_id": np.full(steps, policy_id, object),
        "t": t,
    }
    rows = SampleBatch(columns)
    if kind == "open":  # of the first part, the collector did not know what follows
        rows["has_new_obs"][2] = False
        writer.write(rows[:3])
        writer.write(rows[3:])
    else:
        writer.write(rows)
    final = obs.copy()
    if not known[-1]:
        final[-1] = np.nan
    if kind != "gap":
        return [Expected(name, final, actions, rewards, logp, kind == "over")]
    before = np.concatenate([obs[:3], np.full((1, 2), np.nan, np.float32)])
    return [
        Expected(name, before, actions[:3], rewards[:3], logp[:3], False),
        Expected(f"{name}@5", obs[3:], actions[3:], rewards[3:], logp[3:], True),
    ]


def _observed(prefix: str, obs: Any, load: Any, choices: bool) -> dict[str, Any]:
    return {prefix: obs} if choices else {f"{prefix}.place": obs, f"{prefix}.load": load}
