"""A log is checked without a candidate."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from policy.judging.log_review import ImportReview, review
from storage.spaces.descriptors import Box, Discrete, MultiDiscrete
from tests.policy.judging.test_evaluate_verdicts import log_episodes, uniform_log


def named(root):
    return {one.name: one for one in review(root, "default")}


def test_a_sound_log_passes(tmp_path: Path) -> None:
    """Both checks are there, with what they found."""
    uniform_log(tmp_path, [0.8, 0.4, 0.4, 0.4], n=3000)
    found = named(tmp_path)
    assert set(found) == {"propensities", "repeats"}
    assert all(one.passed for one in found.values())
    assert "which agrees with 1" in found["propensities"].sentence


def test_wrong_propensities_are_named(tmp_path: Path) -> None:
    """One app of three logs a uniform propensity and takes the first action in half."""
    rng, n = np.random.default_rng(0), 6000
    tags = [json.dumps({"app": f"a{i % 3}"}) for i in range(n)]
    biased = (np.arange(n) % 3 == 1) & (rng.random(n) < 1 / 3)
    actions = np.where(biased, 0, rng.integers(4, size=n))[:, None]
    probs = np.full((n, 1), 0.25)
    log_episodes(tmp_path, rng.normal(size=(n, 1, 2)), actions, np.ones((n, 1)), probs, tags=tags)
    found = named(tmp_path)["propensities"]
    assert not found.passed
    assert "action 0 with app=a1" in found.sentence


@pytest.mark.parametrize("copies", [1, 2])
def test_actions_of_several_positions_are_told_apart(tmp_path: Path, copies: int) -> None:
    """All 12 actions have one propensity; episodes are there once, or twice."""
    rng, n = np.random.default_rng(0), 2400
    actions = np.stack([rng.integers(4, size=n), rng.integers(3, size=n)], axis=1)
    actions, obs = np.tile(actions, (copies, 1)), np.tile(rng.normal(size=(n, 2)), (copies, 1))
    spaces, m = (Box((2,)), MultiDiscrete((4, 3))), n * copies
    rewards, probs = np.zeros((m, 1)), np.full((m, 1), 1 / 12)
    log_episodes(tmp_path, obs[:, None], actions[:, None], rewards, probs, spaces=spaces)
    found = named(tmp_path)
    assert found["propensities"].passed
    assert found["repeats"].passed is (copies == 1)


def test_a_log_that_is_sampled_by_outcome_passes(tmp_path: Path) -> None:
    """All rewards are logged, and a tenth of the other episodes; without a weight it fails."""
    rng, n = np.random.default_rng(1), 20_000
    actions = rng.integers(4, size=n)
    rewards = (rng.random(n) < np.array([0.1, 0.02, 0.02, 0.02])[actions]).astype(np.float64)
    kept = (rewards == 1) | (rng.random(n) < 0.1)
    obs = np.repeat(rng.integers(10, size=(n, 1, 1)).astype(np.float64), 2, axis=2)
    given = (obs, actions[:, None], rewards[:, None], np.full((n, 1), 0.25))
    given = tuple(column[kept] for column in given)
    chances = np.where(rewards == 1, 1.0, 0.1)[kept]
    for name, said in (("said", chances), ("unsaid", 1.0)):
        log_episodes(tmp_path / name, *given, pass_prob=said)
        found = named(tmp_path / name)
        assert [one.passed for one in found.values()] == [name == "said"] * 2
    columns = {"actions": actions[kept], "action_logp": np.full(chances.size, np.log(0.25))}
    for given_table in (columns, columns | {"pass_prob": chances}):
        importing = ImportReview()
        importing.add("default", Discrete(4), pa.table(given_table))
        assert importing.checks()["default"][0]["passed"] is ("pass_prob" in given_table)
