"""Every kind of environment keeps the promises of BaseEnv, and breaks are found.

Programs that make the calls are in `tests/ingest/embedded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from pettingzoo.test.example_envs import generated_agents_parallel_v0

from policy.envs.base_env import BaseEnv, SteppedBaseEnv, to_base_env
from policy.envs.conformance import BaseEnvConformance
from storage.conformance import ConformanceError
from tests.policy.envs.test_base_env import Steps, Team
from tests.policy.toy_envs import AgentsEnv, DictEnv


class TestCopies(BaseEnvConformance):
    def env(self) -> BaseEnv:
        return to_base_env(Steps(0), num_envs=3, make_env=Steps)


class TestNested(BaseEnvConformance):
    def env(self) -> BaseEnv:
        return to_base_env(DictEnv())


class TestAgents(BaseEnvConformance):
    def env(self) -> BaseEnv:
        return to_base_env(AgentsEnv(), num_envs=2, make_env=lambda index: AgentsEnv())


class TestTeam(BaseEnvConformance):
    def env(self) -> BaseEnv:
        return to_base_env(Team())


class Ending(generated_agents_parallel_v0.parallel_env):  # type: ignore[misc]
    """Changing agents; an episode ends after 20 steps."""

    def step(self, actions: Any) -> Any:
        self.num_steps += 5
        return super().step(actions)


class TestPettingZoo(BaseEnvConformance):
    def env(self) -> BaseEnv:
        return to_base_env(Ending(), seed=3)


class TestNextStep(BaseEnvConformance):
    mode = AutoresetMode.NEXT_STEP

    def env(self) -> BaseEnv:
        makers = [lambda i=i: Steps(i) for i in range(2)]
        return to_base_env(SyncVectorEnv(makers, autoreset_mode=self.mode, copy=False))


class TestSameStep(TestNextStep):
    mode = AutoresetMode.SAME_STEP


class TestNoAutoreset(TestNextStep):
    mode = AutoresetMode.DISABLED


class TestProcesses(BaseEnvConformance):
    polls = 10

    def env(self) -> BaseEnv:
        return to_base_env(AsyncVectorEnv([Steps, Steps]))


# --- broken environments, each by the check that finds it ----------------------------------------


class Broken(SteppedBaseEnv):
    def __init__(self) -> None:
        super().__init__([Steps()], make_env=Steps)


class Sparse(Broken):
    """Leaves out the episode's flag until it is set."""

    def poll(self) -> Any:
        news = super().poll()
        for flags in (news[2][0], news[3][0]):
            if not flags["__all__"]:
                del flags["__all__"]
        return news


class Reusing(Broken):
    """Returns one array for every observation."""

    def poll(self) -> Any:
        news = super().poll()
        self._kept = getattr(self, "_kept", news[0][0]["agent0"])
        self._kept[:] = news[0][0]["agent0"]
        return ({0: {"agent0": self._kept}}, *news[1:])


class Obliging(Broken):
    """Takes any action."""

    def send_actions(self, actions: Mapping[Any, Mapping[Any, Any]]) -> None:
        super().send_actions({0: {"agent0": 0}})


class Vague(Broken):
    """Resets without a word about the env."""

    def try_reset(self, env_id: Any) -> Any:
        return tuple(found[env_id] for found in super().try_reset(env_id))


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Sparse, "a_poll_is_whole"),
        (Reusing, "observations_stay_as_they_were"),
        (Obliging, "actions_that_nobody_waits_for_are_refused"),
        (Vague, "a_reset_begins_an_episode"),
    ],
)
def test_the_suite_finds_what_is_broken(broken: type[Broken], check: str) -> None:
    class Suite(BaseEnvConformance):
        def env(self) -> BaseEnv:
            return broken()

    with pytest.raises(ConformanceError):
        getattr(Suite(), f"test_{check}")()
