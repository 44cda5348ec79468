"""Small logs of several steps, for the tests of offline algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np

from storage.experience.sample_batch import SampleBatch


def log_of(
    obs: Any, actions: Any, rewards: Any, terminateds: Any, new_obs: Any, **columns: Any
) -> SampleBatch:
    """Rows of one stream; a terminated row ends its episode and has no next observation."""
    ended = np.asarray(terminateds, np.bool_)
    count = len(ended)
    begins = np.concatenate([[0], np.flatnonzero(ended) + 1])
    episode = np.searchsorted(begins, np.arange(count), side="right") - 1
    made = {
        "obs": np.asarray(obs, np.float32),
        "actions": np.asarray(actions),
        "rewards": np.asarray(rewards, np.float64),
        "terminateds": ended,
        "truncateds": np.zeros(count, np.bool_),
        "new_obs": np.asarray(new_obs, np.float32),
        "has_new_obs": ~ended,
        "t": np.arange(count) - begins[episode],
        "stream": np.full(count, "s", object),
        "ordinal": np.arange(count),
        "episode_ordinal": episode,
        "agent_id": np.full(count, "", object),
    }
    return SampleBatch(**(made | columns))


def corridor(count: int, seed: int = 0, *, continuous: bool = False) -> SampleBatch:
    """A walk on a line by random moves, which ends after eight steps at most.

    A move to the right earns 1. So the best action is 1, or a positive number.
    """
    rng = np.random.default_rng(seed)
    t = np.arange(count) % 8
    if continuous:
        actions: Any = rng.normal(size=(count, 1)).astype(np.float32)
        right = actions[:, 0] > 0
    else:
        actions = rng.integers(0, 2, count)
        right = actions == 1
    obs = np.stack([t / 8, rng.normal(size=count)], axis=1)
    following = np.stack([(t + 1) / 8, rng.normal(size=count)], axis=1)
    over = (t == 7) | (np.arange(count) == count - 1)
    return log_of(obs, actions, right.astype(np.float64), over, following)
