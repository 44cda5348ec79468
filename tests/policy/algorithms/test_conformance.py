"""Every algorithm that ships keeps the promises to a learner, and breaks are found."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pytest

from benchmarks.ppo_cartpole import CartPoles
from policy.algorithms.bandit import Bandit, BanditConfig
from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.bc import BCConfig
from policy.algorithms.conformance import AlgorithmConformance
from policy.algorithms.cql import CQLConfig
from policy.algorithms.dm import DMConfig
from policy.algorithms.iql import IQLConfig
from policy.algorithms.marwil import MARWILConfig
from policy.algorithms.ppo import PPO, PPOConfig
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.conformance import ConformanceError
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete
from tests.policy.conftest import BanditLog

PLAYED = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(hidden=(8,)))
DECIDED = PolicySpec(
    Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(8,)), observation_filter="MeanStdFilter"
)


class TestIPS(AlgorithmConformance):
    def config(self) -> AlgorithmConfig:
        return BanditConfig(objective="ips", epochs=2, minibatch=16)

    def policy(self) -> Policy:
        return Policy(DECIDED, seed=3)

    def batch(self) -> SampleBatch:
        return BanditLog.make(40).batch()


class TestSNIPS(TestIPS):
    def config(self) -> AlgorithmConfig:
        return BanditConfig(objective="snips", epochs=2, minibatch=16)


class TestDR(TestIPS):
    def config(self) -> AlgorithmConfig:
        return BanditConfig(objective="dr", epochs=2, minibatch=16)


class TestDM(TestIPS):
    def config(self) -> AlgorithmConfig:
        return DMConfig(updates=6, minibatch=16)


class TestPPO(AlgorithmConformance):
    def config(self) -> AlgorithmConfig:
        return PPOConfig(epochs=2, minibatch=8, schedule_steps=100)

    def policy(self) -> Policy:
        return Policy(PLAYED, seed=5)

    def batch(self) -> SampleBatch:
        return CartPoles(2, 5).play(self.policy().to_numpy(version=1), 16)


class TestCQL(TestPPO):
    def config(self) -> AlgorithmConfig:
        return CQLConfig(epochs=2, minibatch=8, target_every=3)


class TestBC(TestPPO):
    def config(self) -> AlgorithmConfig:
        return BCConfig(updates=6, minibatch=8)


class TestMARWIL(TestPPO):
    def config(self) -> AlgorithmConfig:
        return MARWILConfig(updates=6, minibatch=8, advantages_every=3)


class TestIQL(TestPPO):
    def config(self) -> AlgorithmConfig:
        return IQLConfig(updates=6, minibatch=8)


# --- broken algorithms, each by the check that finds it ------------------------------------------


class Unnamed(Bandit):
    """Returns a metric that it does not name."""

    def update(self, *given, **more):
        return {**super().update(*given, **more), "secret": 1.0}


class Scaling(Bandit):
    """Scales the caller's rewards."""

    def update(self, batch, *given, **more):
        batch["rewards"] /= 2.0
        return super().update(batch, *given, **more)


class Wilful(Bandit):
    """Draws from a generator of its own."""

    def update(self, batch, rng, *given, **more):
        return super().update(batch, np.random.default_rng(), *given, **more)


class Idle(Bandit):
    """Learns nothing."""

    def update(self, *given, **more):
        return dict.fromkeys(self.metric_names, 0.0)


class Careless(Bandit):
    """Does not look for its columns."""

    def left_out(self, batch):
        return super().left_out(batch) if "obs" in batch else {}


class Forgetful(PPO):
    """Begins its schedules again after a checkpoint."""

    def load_state_dict(self, state):
        pass


@dataclass
class Loose:
    """Settings that may change after the algorithm was built."""

    columns = ("obs",)
    lr: float = 1e-3


@pytest.mark.parametrize(
    ("broken", "base", "check"),
    [
        (Unnamed, TestIPS, "an_update_learns_and_gives_its_metrics"),
        (Idle, TestIPS, "an_update_learns_and_gives_its_metrics"),
        (Scaling, TestIPS, "a_batch_stays_as_it_was"),
        (Wilful, TestIPS, "the_same_seed_learns_the_same"),
        (Careless, TestIPS, "rows_are_left_out_by_reason"),
        (Forgetful, TestPPO, "an_interrupted_learner_continues_exactly"),
    ],
)
def test_the_suite_finds_what_is_broken(broken, base, check):
    class Suite(base):
        def config(self):
            sound = super().config()

            class Config(type(sound)):
                def build(self, policy):
                    return broken(policy, self)

            return Config(**asdict(sound))

    with pytest.raises(ConformanceError):
        getattr(Suite(), f"test_{check}")()


def test_settings_that_may_change_are_found():
    class Suite(TestIPS):
        def config(self):
            return Loose()

    with pytest.raises(ConformanceError, match="frozen"):
        Suite().test_the_config_is_frozen_and_plain()
