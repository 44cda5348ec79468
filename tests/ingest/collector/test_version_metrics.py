"""Results of each version are counted once, as sums, for a bounded number of versions."""

from __future__ import annotations

import numpy as np
import pytest

from ingest.collector.version_metrics import VERSIONS, Moments, VersionMetrics
from storage.experience.endings import Ending
from storage.experience.episode import Part


def part(
    rewards: list[float],
    versions: list[int],
    *,
    number: int = 0,
    ended: Ending | None = "terminated",
    ordinal: int = 0,
    prob: float = 0.5,
) -> Part:
    steps = len(rewards)
    return Part(
        episode_id=f"e{ordinal}",
        part=number,
        t0=0,
        steps=steps,
        schema_id="s",
        obs=b"",
        actions=b"",
        rewards=np.array(rewards).tobytes(),
        action_logp=np.log(np.full(steps, prob)).tobytes(),
        policy_version=np.array(versions).tobytes(),
        source=b"\0" * steps,
        pass_prob=np.ones(steps).tobytes(),
        ts=np.zeros(steps, np.int64).tobytes(),
        received_ts=np.zeros(steps, np.int64).tobytes(),
        ended=ended,
        episode_ordinal=ordinal,
    )


def test_returns_rewards_and_propensities_are_summed() -> None:
    """A return belongs to the version of the first step, a reward to the version that acted."""
    played = VersionMetrics()
    played.note("s", [part([1.0, 2.0], [1, 2]), part([5.0], [2], ordinal=1, prob=float("nan"))])
    assert played.of("default", 1) == {
        "episode_return": Moments(1, 3.0, 9.0),
        "step_reward": Moments(1, 1.0, 1.0),
        "action_propensity": Moments(1, 0.5, 0.25),
    }
    assert played.of("default", 2)["episode_return"] == Moments(1, 5.0, 25.0)
    assert played.of("default", 2)["step_reward"] == Moments(2, 7.0, 29.0)
    assert played.of("default", 2)["action_propensity"].n == 1


def test_an_episode_in_several_parts_is_one_return() -> None:
    """An episode in several parts counts once, when it ends; one whose start is unknown has no
    return."""
    played = VersionMetrics()
    played.note("s", [part([1.0], [1], ended=None)])
    assert played.of("default", 1)["episode_return"].n == 0
    played.note("s", [part([2.0], [2], number=1, ended=None), part([4.0], [2], number=2)])
    assert played.of("default", 1)["episode_return"] == Moments(1, 7.0, 49.0)
    played.note("s", [part([9.0], [1], number=3, ordinal=5)])
    assert played.of("default", 1)["episode_return"].n == 1


def test_versions_and_unknown_ones_take_bounded_memory() -> None:
    played = VersionMetrics()
    for version in range(-1, 1000):
        played.note("s", [part([1.0], [version], ordinal=version)])
    assert [v for v in range(1000) if played.of("default", v)["step_reward"].n] == list(
        range(1000 - VERSIONS, 1000)
    )
    assert played.of("default", None)["step_reward"].n == 0


def test_moments() -> None:
    values = np.array([1.0, 4.0, 7.0])
    found = Moments().with_all(values[:1]).with_all(values[1:])
    assert (found.mean, found.variance) == (pytest.approx(4.0), pytest.approx(9.0))
