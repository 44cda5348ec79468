"""Borrowed losses: they keep the promises of an algorithm, learn, and refuse by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.by_name import FROM_LOGS, LIVE, algorithm
from policy.algorithms.conformance import AlgorithmConformance
from policy.algorithms.learner import Learner
from policy.algorithms.torchrl import (
    DQNConfig,
    RecentRows,
    REDQConfig,
    SACConfig,
    TD3BCConfig,
    TD3Config,
    TorchRLConfig,
    to_tensordict,
)
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from policy.training.train import acting_spec
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete, MultiDiscrete, Space
from tests.policy.algorithms.steps import corridor

SMALL = ModuleSpec(hidden=(16,), value_head=False)
BOUNDED = Box((1,), low=-2.0, high=2.0)
BORROWED = [name for name in FROM_LOGS if name.startswith("torchrl:")]


def spec_for(action: Space) -> PolicySpec:
    return PolicySpec(Box((2,)), action, SMALL, observation_filter="MeanStdFilter")


def made(config: AlgorithmConfig, action: Space, seed: int = 0) -> Learner:
    return Learner(Policy(acting_spec(spec_for(action), config), seed=seed), config, seed=seed)


class TestConformance(AlgorithmConformance):
    """Of a log; what acts and learns at once fills its replay from shards (test_replaying)."""

    @pytest.fixture(
        autouse=True,
        params=[
            (DQNConfig(updates=3), Discrete(2)),
            (SACConfig(updates=3), Discrete(2)),
            (SACConfig(updates=3), BOUNDED),
            (TD3Config(updates=3), BOUNDED),
            (TD3BCConfig(updates=3), BOUNDED),
            (REDQConfig(updates=3), BOUNDED),
        ],
        ids=lambda pair: f"{type(pair[0]).__name__}-{type(pair[1]).__name__}",
    )
    def chosen(self, request: pytest.FixtureRequest) -> None:
        self._config, self._action = request.param

    def config(self) -> AlgorithmConfig:
        config: AlgorithmConfig = self._config
        return config

    def policy(self) -> Policy:
        return Policy(acting_spec(spec_for(self._action), self._config), seed=3)

    def batch(self) -> SampleBatch:
        return _usable(corridor(40, continuous=isinstance(self._action, Box)))


def _usable(log: SampleBatch) -> SampleBatch:
    return log.take(log["terminateds"] | log["has_new_obs"])


@pytest.mark.parametrize(
    ("name", "action"),
    [(name, BOUNDED) for name in BORROWED if name != "torchrl:dqn"]
    + [("torchrl:dqn", Discrete(2)), ("torchrl:sac", Discrete(2))],
    ids=str,
)
def test_each_learns_from_a_log(name: str, action: Space) -> None:
    """The move to the right earns 1: the best action is 1, or a number above 0."""
    log = corridor(800, continuous=isinstance(action, Box))
    learner = made(algorithm(name, updates=100, minibatch=128, lr=5e-3, target_rate=0.05), action)
    learner.update(log)
    acted = learner.policy.to_numpy().act(log["obs"], np.random.default_rng(0), explore=False)
    assert (np.ravel(acted.columns[""]) > 0).mean() > 0.8
    assert learner.lineage == {"s": [[0, 799]]}


def test_rows_become_a_tensordict() -> None:
    """Choices from 0 or one-hot; a row that leads nowhere known is not in it; `done` is the end."""
    log = corridor(9)
    log["has_new_obs"][0] = False
    log["rewards"][1] = np.nan
    spec = PolicySpec(Box((2,)), Discrete(2, 5), SMALL)
    log["actions"] = log["actions"] + 5
    rows = to_tensordict(spec, log)
    assert rows.batch_size == (7,)
    assert rows["action"].tolist() == (log["actions"][2:] - 5).tolist()
    assert rows["next", "done"][:, 0].tolist() == log["terminateds"][2:].tolist()
    assert torch.equal(rows["next", "done"], rows["next", "terminated"])
    np.testing.assert_array_equal(rows["observation"].numpy(), log["obs"][2:])
    np.testing.assert_array_equal(rows["next", "observation"].numpy(), log["new_obs"][2:])
    hot = to_tensordict(spec, log, one_hot=True)["action"]
    assert hot.argmax(dim=1).tolist() == rows["action"].tolist()
    assert hot.sum(dim=1).tolist() == [1] * 7


def test_a_resumed_learner_continues_exactly_once_its_replay_is_filled(tmp_path: Path) -> None:
    """Critics, targets and optimizer are in the checkpoint, the replay's rows in shards."""
    first, second = corridor(32, continuous=True), corridor(32, seed=1, continuous=True)
    straight = made(SACConfig(updates_per_row=0.2), BOUNDED)
    straight.update(first)
    straight.save(tmp_path / "checkpoint")
    resumed = made(SACConfig(updates_per_row=0.2), BOUNDED, seed=4)
    resumed.load(tmp_path / "checkpoint")
    resumed.algorithm.refill(first)  # type: ignore[attr-defined]
    for learner in (straight, resumed):
        learner.update(second)
    for name, array in straight.policy.get_weights().items():
        np.testing.assert_array_equal(array, resumed.policy.get_weights()[name])


def test_an_update_that_diverges_leaves_critics_and_replay_as_they_were() -> None:
    """Rows that were left out for it are never drawn again. It diverges after some steps."""
    learner = made(SACConfig(lr=1e30), BOUNDED)
    algorithm: Any = learner.algorithm
    algorithm.refill(corridor(40, continuous=True))
    before = {name: value.clone() for name, value in algorithm.networks.state_dict().items()}
    replayed = len(algorithm.replay)
    assert learner.update(corridor(32, seed=1, continuous=True))["rows"] == 0
    for name, value in algorithm.networks.state_dict().items():
        assert torch.equal(value, before[name])
    assert (len(algorithm.replay), algorithm.replay.added) == (replayed, 0)


def test_the_replay_prefers_the_latest_rows_and_forgets_the_first() -> None:
    """With recency 2 a half of the rows drawn are among the latest quarter."""
    replay = RecentRows(100)
    for i in range(3):
        replay.add(to_tensordict(spec_for(Discrete(2)), corridor(48, seed=i)))
    assert (len(replay), replay.added) == (100, 144)
    replay.rows["action"] = torch.arange(100)
    rng = np.random.default_rng(0)
    drawn = replay.draw(20_000, 2.0, rng)["action"]
    assert (drawn >= 75).double().mean().item() == pytest.approx(0.5, abs=0.02)
    assert (replay.draw(20_000, 1.0, rng)["action"] >= 75).double().mean() < 0.27


@pytest.mark.parametrize("name", BORROWED)
def test_what_cannot_be_published_is_refused_by_name(name: str) -> None:
    """Spaces for whose actions the algorithm has no head."""
    wrong: list[Space] = [MultiDiscrete((2, 2))]
    if name != "torchrl:sac":
        wrong.append(BOUNDED if name == "torchrl:dqn" else Discrete(2))
    for action in wrong:
        with pytest.raises(ValueError, match=f"{name}: expected a .* action space, got .*"):
            made(algorithm(name), action)


@dataclass(frozen=True, kw_only=True)
class Misfit(TorchRLConfig):
    """Reads what no batch has."""

    def loss(self, policy: Policy) -> Any:
        from torchrl.modules import QValueActor  # noqa: PLC0415  an optional extra
        from torchrl.objectives import DQNLoss  # noqa: PLC0415  an optional extra

        values = QValueActor(policy.module, in_keys=["pixels"], action_space="categorical")
        return DQNLoss(values, action_space="categorical", delay_value=True)


def test_a_loss_of_other_keys_is_refused() -> None:
    """Before the first row, with the keys that rows have."""
    with pytest.raises(ValueError, match=r"Misfit: expected a loss that reads .*pixels"):
        made(Misfit(), Discrete(2))


def test_defaults_from_a_log_and_from_clients_differ_in_updates() -> None:
    """A log has a number of updates; while clients act each row brings its own."""
    assert [algorithm("torchrl:sac", live=live).updates for live in (False, True)] == [  # type: ignore[attr-defined]
        4000,
        None,
    ]
    assert {name for name in LIVE if name != "ppo"} <= set(FROM_LOGS)
    assert "torchrl:td3bc" not in LIVE
