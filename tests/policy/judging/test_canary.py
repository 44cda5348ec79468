"""A canary is judged by the episodes assigned to it, at equal age, failures included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.judging.canary import judge_canary, promote, start_canary
from policy.judging.settings import CanarySettings
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import WeightsNotFound
from storage.experience.endings import Ending
from storage.experience.episode import Part
from storage.experience.hashed import ARM, is_canary
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id
from storage.weights.decisions import load_decisions

SPACES = Box((2,)), Discrete(4)
SPEC = PolicySpec(*SPACES, ModuleSpec(hidden=(), value_head=False))
SCHEMA = schema_id(*SPACES)
STREAM = f"0123456789ab-{SCHEMA}"
SHARE = 0.3
TIMEOUT = 10.0
SECOND = 1_000_000


class Traffic:
    """A root with a live version, and episodes of one step, a second apart."""

    def __init__(self, root: Path, **rules: Any) -> None:
        self.root = root
        rules = {"episode_timeout": TIMEOUT, "reward_range": (0.0, 1.0), **rules}
        self.declaration = PolicyDeclaration(observation=SPACES[0], action=SPACES[1], **rules)
        save_declaration(root, self.declaration)
        self.store = WeightStore(root, "default")
        self.store.publish(self.candidate(1))
        self.rng = np.random.default_rng(7)
        self.n = 0

    def candidate(self, seed: int) -> str:
        weights = Policy(SPEC, seed=seed).get_weights()
        return self.store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={})

    def log(
        self,
        count: int,
        mean: dict[bool, float],
        *,
        broken: dict[bool, float] | None = None,
        lose: float = 0.0,
        how: Ending = "broken",
        agents: int = 1,
        acted: int | None = None,
        odd: float | None = None,
    ) -> None:
        """Write episodes; `mean` and `broken` are by arm (True: the canary's).

        `lose` is the share of the canary's episodes that are lost. All `agents` of an episode earn
        the same, and only the last one breaks. `acted` is the version of the first steps, if it is
        not the assigned one. `odd` is the reward of every 50th episode.
        """
        live = self.store.live()
        assert live is not None
        parts = []
        for _ in range(count):
            name, at = f"e{self.n}", self.n
            self.n += 1
            canary = live.canary_version is not None and is_canary("default", name, SHARE)
            if canary and self.rng.random() < lose:
                continue
            fails = self.rng.random() < (broken or {True: 0.0, False: 0.0})[canary]
            version = live.canary_version if canary else live.version
            arm = {ARM: f"{live.generation}:{version}"} if live.canary_version else {}
            reward = float(self.rng.random() < mean[canary])
            if odd is not None and not at % 50:
                reward = odd
            parts += [
                Part(
                    episode_id=name,
                    agent_id=f"agent{agent}",
                    part=0,
                    t0=0,
                    steps=1,
                    schema_id=SCHEMA,
                    obs=np.zeros(2, np.float32).tobytes(),
                    actions=np.zeros(1, np.int64).tobytes(),
                    rewards=np.array([reward]).tobytes(),
                    action_logp=np.log([0.25]).tobytes(),
                    policy_version=np.array([version if acted is None else acted]).tobytes(),
                    source=b"\0",
                    pass_prob=np.ones(1).tobytes(),
                    ts=np.array([at * SECOND]).tobytes(),
                    received_ts=np.array([at * SECOND]).tobytes(),
                    ended=how if fails and agent == agents - 1 else "terminated",
                    ordinal=at * agents + agent,
                    episode_ordinal=at * agents + agent,
                    tags=json.dumps(arm),
                )
                for agent in range(agents)
            ]
        ShardWriter(self.root / "shards").write(STREAM, canonical_json(*SPACES), parts)


EQUAL = {True: 0.3, False: 0.3}


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    found = Traffic(tmp_path)
    found.log(500, EQUAL)
    return found


def test_the_size_that_is_needed_is_told_at_the_start(traffic: Traffic) -> None:
    """The size is for a difference of a tenth of the live version's mean return."""
    started = start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    assert (started["canary"], started["version"], started["share"]) == (2, 1, SHARE)
    assert started["recent"] == 500
    assert started["effect"] == pytest.approx(0.03, abs=0.01)
    assert 10_000 < started["needed"] < 500_000


def test_a_canary_that_cannot_be_recorded_is_on(
    traffic: Traffic, caplog: pytest.LogCaptureFixture
) -> None:
    (traffic.root / "decisions").write_text("not a folder")
    assert start_canary(traffic.root, "default", traffic.candidate(2), SHARE)["canary"] == 2
    assert "this is not recorded" in caplog.text


def test_the_size_is_told_of_any_episodes_where_the_version_is_new(traffic: Traffic) -> None:
    """If the live version has no episodes of its own yet, those of earlier versions are used."""
    traffic.store.publish(traffic.candidate(3))
    started = start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    assert (started["version"], started["recent"]) == (2, 500)
    assert 10_000 < started["needed"] < 500_000


def test_what_is_missing_is_said(traffic: Traffic) -> None:
    """The reasons name missing episodes, equal returns, and episodes that are too recent.

    Episodes that are old enough, but not counted yet, are not called too recent.
    """
    start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    (none,) = judge_canary(traffic.root, "default")["reasons"]
    assert "0 episodes of the canary and 0 of the live version are compared: more of both" in none
    traffic.log(200, {True: 1.0, False: 1.0})
    wall = 699.0  # the last one started; each counts 165 s after its start, or later
    found = judge_canary(
        traffic.root, "default", settings=CanarySettings(age=100.0), clock=lambda: wall
    )
    alike, young = found["reasons"]
    assert "no difference in returns is to be seen yet: more episodes" in alike
    assert "165 episodes are too recent: one counts about 165 s after its start" in young
    assert (found["young"], found["waiting"]) == (165, 0)
    wall = 800.0  # no episode since
    found = judge_canary(
        traffic.root, "default", settings=CanarySettings(age=100.0), clock=lambda: wall
    )
    _, young, waiting = found["reasons"]
    assert "64 episodes are too recent" in young
    assert "101 episodes are old enough, but counted once" in waiting
    assert (found["young"], found["waiting"]) == (165, 101)


def test_an_episode_counts_a_reward_window_later_than_its_age_is_over(tmp_path: Path) -> None:
    """The later step that shows what it earned is in a shard after a reward window of its own."""
    traffic = Traffic(tmp_path, reward_window=60.0)
    start_canary(tmp_path, "default", traffic.candidate(2), SHARE)
    traffic.log(200, EQUAL)
    wall = 199.0 + 60.0  # the last one started; its window has closed
    found = judge_canary(tmp_path, "default", settings=CanarySettings(age=70.0), clock=lambda: wall)
    assert found["episodes"] == 65, "the first 65 started 195 s ago, or earlier"
    assert "135 episodes are too recent: one counts about 195 s after" in found["reasons"][-1]
    assert (found["young"], found["waiting"]) == (135, 0)
    found = judge_canary(
        tmp_path, "default", settings=CanarySettings(age=70.0), clock=lambda: wall + 1
    )
    assert "counted once a step that arrived 135 s after the start" in found["reasons"][-1]
    assert (found["young"], found["waiting"]) == (135, 1)


@pytest.mark.parametrize(("acted", "crossed", "unacted"), [(None, 0, 0), (-1, 0, 100), (7, 100, 0)])
def test_an_episode_of_a_programs_own_rule_is_not_one_of_the_other_version(
    traffic: Traffic, acted: int | None, crossed: int, unacted: int
) -> None:
    """Steps that `log_action` logged have no version: they are counted apart."""
    start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    traffic.log(100, EQUAL, acted=acted)
    traffic.log(200, EQUAL)
    found = judge_canary(
        traffic.root, "default", settings=CanarySettings(age=20.0), clock=lambda: 1000.0
    )
    assert (found["crossed"], found["unacted"]) == (crossed, unacted)


def test_a_better_canary_is_promoted_and_the_decision_kept(traffic: Traffic) -> None:
    """Episodes from before its start are not compared, whatever they earned."""
    start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    traffic.log(1500, {True: 0.7, False: 0.3})
    found = promote(traffic.root, "default")
    assert (found["verdict"], found["promoted"], found["version"]) == ("better", True, 2)
    assert found["episodes"] + found["young"] == 1500
    assert (found["crossed"], found["incomplete"], found["open"]) == (0, 0, 0)
    low, high = found["returns"]["interval"]
    assert 0 < low < found["returns"]["difference"] < high
    live = traffic.store.live()
    assert live is not None
    assert (live.version, live.canary_version) == (2, None)
    started, kept = load_decisions(traffic.root, "default").known
    assert (started["kind"], started["verdict"]) == ("canary start", None)
    assert started["reasons"] == ["version 2 acts in 0.3 of the episodes"]
    assert started["candidate"] == kept["candidate"]
    assert (kept["kind"], kept["verdict"], kept["published"]) == ("canary", "better", True)


def test_a_worse_canary_and_an_equal_one_are_not_promoted(traffic: Traffic) -> None:
    start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    traffic.log(300, EQUAL)
    found = promote(traffic.root, "default")
    assert (found["verdict"], found["promoted"]) == ("cannot tell", False)
    assert found["missing"] > 0
    traffic.log(1500, {True: 0.1, False: 0.5})
    assert promote(traffic.root, "default")["verdict"] == "worse"
    live = traffic.store.live()
    assert live is not None
    assert live.canary_version == 2
    assert promote(traffic.root, "default", gated=False)["promoted"], "a person may know better"
    kept = load_decisions(traffic.root, "default").known[-1]
    assert (kept["verdict"], kept["reasons"][0]) == ("worse", "without a gate")


def test_broken_episodes_count_as_the_default_reward(traffic: Traffic) -> None:
    """A canary that earns more in complete episodes is worse if every second episode breaks."""
    start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    traffic.log(1500, {True: 0.6, False: 0.3}, broken={True: 0.5, False: 0.0})
    found = judge_canary(traffic.root, "default")
    assert found["verdict"] == "worse"
    assert found["returns"]["canary"] == pytest.approx(0.3, abs=0.07)
    assert found["failures"]["canary"] == pytest.approx(0.5, abs=0.07)


def test_agents_of_one_episode_are_one_number(tmp_path: Path) -> None:
    """The rewards of an episode's agents add up, and one agent's failure is the episode's.

    Counted as separate episodes, the agents of two equal arms would differ by chance alone.
    """
    traffic = Traffic(tmp_path)
    traffic.log(500, EQUAL, agents=20)
    started = start_canary(tmp_path, "default", traffic.candidate(2), SHARE)
    assert started["recent"] == 500
    assert started["effect"] == pytest.approx(0.1 * 20 * 0.3, rel=0.2)
    traffic.log(300, EQUAL, agents=20)
    found = judge_canary(tmp_path, "default")
    assert found["episodes"] + found["young"] == 300
    assert found["returns"]["live"] == pytest.approx(6, abs=2)
    assert found["verdict"] == "cannot tell"
    assert found["approximate"], "a step's range is no range of their sum"
    traffic.log(700, EQUAL, agents=20, broken={True: 0.5, False: 0.0})
    found = judge_canary(tmp_path, "default")
    assert found["verdict"] == "worse"
    assert found["failures"]["canary"] == pytest.approx(0.35, abs=0.1)


def test_the_size_needs_no_more_memory_than_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the latest episodes of the live version are kept."""
    monkeypatch.setattr("policy.judging.canary.RECENT", 100)
    traffic = Traffic(tmp_path)
    for mean in (0.9, 0.9, 0.3):
        traffic.log(100, {True: mean, False: mean})
    started = start_canary(tmp_path, "default", traffic.candidate(2), SHARE)
    assert started["recent"] == 100
    assert started["effect"] == pytest.approx(0.03, abs=0.015)


def test_lost_episodes_of_one_arm_refuse_the_comparison(traffic: Traffic) -> None:
    start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    traffic.log(2000, {True: 0.9, False: 0.3}, lose=0.4)
    found = promote(traffic.root, "default")
    assert (found["verdict"], found["promoted"]) == ("cannot tell", False)
    assert "not the share of 0.3" in found["mismatch"]


def test_another_share_is_another_comparison(traffic: Traffic) -> None:
    """Episodes logged at an earlier share are left out: the mixture of the arms differed."""
    second = traffic.candidate(2)
    start_canary(traffic.root, "default", second, SHARE)
    traffic.log(500, {True: 0.9, False: 0.1})
    traffic.store.start_canary(second, SHARE / 2)
    assert judge_canary(traffic.root, "default")["episodes"] == 0


def test_episodes_count_at_the_same_age(tmp_path: Path) -> None:
    """Young episodes wait: an abandoned one is known as such only after its time-out."""
    traffic = Traffic(tmp_path, part_seconds=1.0, seal_seconds=1.0)
    start_canary(tmp_path, "default", traffic.candidate(2), SHARE)
    traffic.log(200, EQUAL, broken={True: 1.0, False: 1.0}, how="abandoned")
    found = judge_canary(tmp_path, "default")
    assert (found["age"], found["young"], found["episodes"]) == (20.0, 22, 178)
    assert (found["failures"]["canary"], found["open"]) == (1.0, 0)
    early = judge_canary(tmp_path, "default", settings=CanarySettings(age=5.0))
    assert (early["young"], early["episodes"], early["open"]) == (7, 193, 193)
    assert early["failures"]["canary"] == 0.0, "at that age they were open"
    with pytest.raises(ValueError, match="more than the reward window"):
        judge_canary(tmp_path, "default", settings=CanarySettings(age=0.0))


def test_without_a_reward_range_the_verdict_is_approximate(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path, reward_range=None)
    start_canary(tmp_path, "default", traffic.candidate(2), SHARE)
    traffic.log(1500, {True: 0.7, False: 0.3})
    found = judge_canary(tmp_path, "default")
    assert (found["verdict"], found["approximate"]) == ("better", True)


@pytest.mark.parametrize(
    ("agents", "why"), [(1, "outside of the declared range 0 to 1"), (2, "beyond 1e+140")]
)
def test_rewards_too_large_to_compare_are_named(tmp_path: Path, agents: int, why: str) -> None:
    """Those of two agents sum to infinity, and have no known range. Start and judgement are strict
    JSON."""
    traffic = Traffic(tmp_path)
    traffic.log(300, EQUAL, odd=1e308)
    started = start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    assert started["recent"] == 294
    assert started["effect"] == pytest.approx(0.03, abs=0.01)
    traffic.log(600, EQUAL, odd=1e308, agents=agents)
    traffic.log(100, EQUAL)
    found = judge_canary(traffic.root, "default")
    assert found["verdict"] == "cannot tell"
    assert why in found["reasons"][0]
    json.dumps([started, found], allow_nan=False)


@pytest.mark.parametrize("cap", [float("nan"), float("inf")])
def test_a_cap_is_a_finite_number(traffic: Traffic, cap: float) -> None:
    """Others would leave nothing to compare, or be no JSON."""
    start_canary(traffic.root, "default", traffic.candidate(2), SHARE)
    with pytest.raises(ValueError, match="reward_cap: expected a finite number, got"):
        judge_canary(traffic.root, "default", settings=CanarySettings(reward_cap=cap))


def test_without_a_canary_there_is_nothing_to_judge(traffic: Traffic) -> None:
    with pytest.raises(WeightsNotFound, match="publish --canary"):
        judge_canary(traffic.root, "default")
