"""The verdicts on logs whose estimates alone would mislead."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.algorithms.bandit import BanditConfig
from policy.inference.action_rule import SAMPLE, ActionRule
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.judging.evaluate import evaluate
from policy.judging.gate import WITHOUT_EXPLORATION, publish
from policy.judging.report import EvaluationResult
from policy.judging.settings import EvaluationSettings, Gate
from policy.networks.policy import Policy
from policy.ope.estimators import Estimate
from policy.training.settings import TrainSettings
from policy.training.train import train
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.dropped_steps import Lost, say_dropped
from storage.declarations.late_rewards import LateReward, say_late
from storage.declarations.policy_files import save_declaration
from storage.errors import PolicyPinned
from storage.experience.episode import Part
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id
from storage.weights.decisions import load_decisions

SPACES = Box((2,)), Discrete(4)
SPEC = PolicySpec(*SPACES, ModuleSpec(hidden=(), value_head=False))
SCHEMA = schema_id(*SPACES)
STREAM = f"0123456789ab-{SCHEMA}"


def log_episodes(
    root: Path,
    obs: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    probs: np.ndarray,
    *,
    first: int = 0,
    pass_prob: Any = 1.0,
    tags: Sequence[str] = (),
    spaces: tuple[Box, Discrete] = SPACES,
    lost: Any = False,
) -> None:
    """Shards of episodes, each a row of (n, T, ...) arrays, with ordinals from `first` on."""
    save_declaration(root, PolicyDeclaration(observation=spaces[0], action=spaces[1]))
    steps, schema = actions.shape[1], schema_id(*spaces)
    parts = [
        Part(
            episode_id=f"e{first + i}",
            part=0,
            t0=0,
            steps=steps,
            schema_id=schema,
            obs=obs[i].astype(spaces[0].dtype).tobytes(),
            actions=actions[i].astype(np.int64).tobytes(),
            rewards=rewards[i].astype(np.float64).tobytes(),
            action_logp=np.log(probs[i]).tobytes(),
            policy_version=np.full(steps, -1).tobytes(),
            source=b"\1" * steps,
            pass_prob=np.full(steps, np.broadcast_to(pass_prob, len(actions))[i]).tobytes(),
            tags=tags[i] if tags else "{}",
            ts=np.full(steps, first + i).tobytes(),
            received_ts=np.full(steps, first + i).tobytes(),
            ended="abandoned" if np.broadcast_to(lost, len(actions))[i] else "terminated",
            ordinal=first + i,
            episode_ordinal=first + i,
        )
        for i in range(len(actions))
    ]
    stream = f"0123456789ab-{schema}"
    ShardWriter(root / "shards").write(stream, canonical_json(*spaces), parts)


def judged(root: Path, digest: str, **settings: Any) -> EvaluationResult:
    """The candidate, judged by the settings of these names."""
    return evaluate(root, "default", digest, EvaluationSettings(**settings))


def stored(
    root: Path,
    logits: Any,
    lineage: Any = None,
    rule: ActionRule = SAMPLE,
    spec: PolicySpec = SPEC,
) -> str:
    """Add a candidate that has the same logits everywhere, shape (4,).

    With shape (2, 4), the logits are linear in the observation.
    """
    given = np.asarray(logits, np.float32)
    weights = {
        "pi.0.weight": given.T.copy() if given.ndim == 2 else np.zeros((4, 2), np.float32),
        "pi.0.bias": given if given.ndim == 1 else np.zeros(4, np.float32),
    }
    return WeightStore(root, "default").add_candidate(
        weights,
        spec=replace(spec, action_rule=rule).to_json(),
        metrics={},
        lineage=lineage or {},
    )


def probabilities(*probs: float) -> np.ndarray:
    return np.log(np.array(probs))


def uniform_log(root: Path, means: Any, n: int = 2000, seed: int = 0, first: int = 0) -> None:
    """One-step decisions by a uniform policy; an action's reward is 1 with its mean."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(4, size=(n, 1))
    rewards = rng.random((n, 1)) < np.asarray(means)[actions]
    log_episodes(
        root, rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25), first=first
    )


def estimate_of(result: EvaluationResult, name: str) -> Estimate:
    """The result's estimate by this estimator."""
    [found] = [one for one in result.target if one.name == name]
    return found


@pytest.mark.parametrize("limits", [None, (0.0, 1.0)])
def test_an_action_that_was_never_logged_cannot_be_judged(tmp_path: Path, limits: Any) -> None:
    """A candidate with 90 % on an unlogged action is refused, although DR alone would pass it."""
    rng, n = np.random.default_rng(1), 6000
    actions = rng.choice([0, 1, 3], size=(n, 1))
    rewards = rng.random((n, 1)) < np.where(actions == 0, 0.8, 0.4)
    obs = rng.normal(size=(n, 1, 2))
    log_episodes(tmp_path, obs, actions, rewards, np.full((n, 1), 1 / 3))
    digest = stored(tmp_path, probabilities(0.09, 0.005, 0.9, 0.005))
    refused = publish(tmp_path, "default", digest, Gate(reward_range=limits))
    found = refused["gate"]
    (guess,) = (one for one in found["target"] if one["name"] == "dr")
    assert guess["ess"] > 500
    assert guess["interval"][0] > found["behaviour"]["value"], "by DR alone it would pass"
    assert (refused["published"], found["verdict"]) == (False, "cannot tell")
    failed = {one["name"]: one["sentence"] for one in found["diagnostics"] if not one["passed"]}
    assert failed.keys() >= {"unsupported_actions", "unsupported_near", "mean_weight"}
    assert "action 2 (90.0% of steps)" in failed["unsupported_actions"]
    assert any("canary" in reason for reason in found["reasons"])


def test_an_action_that_was_never_logged_has_its_name(tmp_path: Path) -> None:
    """The reason names the action as the policy declares it, not by its code."""
    spaces, n = (Box((2,)), Discrete.of(["bed", "lamp", "sofa", "rug"])), 400
    rng = np.random.default_rng(1)
    actions = rng.choice([0, 1, 3], size=(n, 1))
    obs, probs = rng.normal(size=(n, 1, 2)), np.full((n, 1), 1 / 3)
    log_episodes(tmp_path, obs, actions, np.ones((n, 1)), probs, spaces=spaces)
    spec = PolicySpec(*spaces, ModuleSpec(hidden=(), value_head=False))
    digest = stored(tmp_path, probabilities(0.09, 0.005, 0.9, 0.005), spec=spec)
    result = judged(tmp_path, digest, split="all").to_dict()
    (check,) = (one for one in result["diagnostics"] if one["name"] == "unsupported_actions")
    assert check["sentence"].partition(": ")[2].startswith("'sofa' (90.0% of steps)")


@pytest.mark.parametrize("worse", [0.0, 0.001])
def test_rare_costs_without_an_event_are_not_better(tmp_path: Path, worse: float) -> None:
    """Matching rows without a failure do not show that the candidate never fails."""
    n = 1000
    actions = np.tile(np.arange(4), n // 4)[:, None]
    rewards = np.zeros((n, 1))
    rewards[[1, 2]] = -1  # both of other actions than the candidate's
    obs = np.random.default_rng(2).normal(size=(n, 1, 2))
    log_episodes(tmp_path, obs, actions, rewards, np.full((n, 1), 0.25))
    digest = stored(tmp_path, probabilities(0.97 - worse, 0.01, 0.01, 0.01 + worse))
    free = judged(tmp_path, digest, split="all").judgement
    assert (free.verdict, free.approximate) == ("cannot tell", True)
    assert "reward event" in " ".join(free.reasons)
    bound = judged(tmp_path, digest, split="all", reward_range=(-1.0, 0.0)).judgement
    assert (bound.verdict, bound.approximate) == ("cannot tell", False)
    assert "more episodes" in " ".join(bound.reasons)


@pytest.mark.parametrize("rate", [0.002, 0.0024], ids=["equal", "worse"])
def test_policies_with_rare_costs_are_not_published(tmp_path: Path, rate: float) -> None:
    """The default gate publishes none of them.

    In such logs the rows that match a candidate often hold no failure, by chance. Then SNIPS alone
    would call it better.
    """
    certain = 0
    for seed in range(8):
        rng, n, root = np.random.default_rng(seed), 900, tmp_path / str(seed)
        actions = rng.integers(4, size=(n, 1))
        rewards = -(rng.random((n, 1)) < np.where(actions == 0, rate, 0.002)).astype(np.float64)
        obs = rng.normal(size=(n, 1, 2))
        log_episodes(root, obs, actions, rewards, np.full((n, 1), 0.25))
        refused = publish(root, "default", stored(root, probabilities(0.97, *[0.01] * 3)), Gate())
        found = refused["gate"]
        (snips,) = (one for one in found["target"] if one["name"] == "snips")
        certain += snips["interval"][0] > found["behaviour"]["value"]
        assert (refused["published"], found["verdict"]) == (False, "cannot tell")
        assert "reward event" in " ".join(found["reasons"])
    assert certain >= 3


def test_a_declared_range_bounds_without_being_said_again(tmp_path: Path) -> None:
    """The range is the policy's, unless one is passed."""
    uniform_log(tmp_path, (0.2, 0.4, 0.6, 0.8))
    rules = PolicyDeclaration(observation=SPACES[0], action=SPACES[1], reward_range=(0.0, 1.0))
    save_declaration(tmp_path, rules)
    digest = stored(tmp_path, probabilities(0.1, 0.1, 0.1, 0.7))
    found = judged(tmp_path, digest, split="all")
    assert (found.reward_range, found.judgement.approximate) == ((0.0, 1.0), False)
    asked = judged(tmp_path, digest, split="all", reward_range=(0.0, 2.0))
    assert asked.reward_range == (0.0, 2.0)
    no_limits = (-math.inf, math.inf)
    free = judged(tmp_path, digest, split="all", reward_range=no_limits)
    assert (free.reward_range, free.judgement.approximate) == (None, True)


@pytest.mark.parametrize("limits", [None, (0.0, 1.0)])
def test_a_challenger_is_measured_by_the_live_version(tmp_path: Path, limits: Any) -> None:
    """The challenger's 0.61 is above the logging policy's 0.4 and below the live version's 0.85."""
    uniform_log(tmp_path, [0.87, 0.62, 0.06, 0.06], n=8000)
    live = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    challenger = stored(tmp_path, probabilities(0.01, 0.97, 0.01, 0.01))
    store = WeightStore(tmp_path, "default")
    store.publish(live)
    refused = publish(tmp_path, "default", challenger, Gate(reward_range=limits))
    assert not refused["published"]
    assert refused["gate"]["verdict"] == "worse"
    bars = {one["bar"]: one["verdict"] for one in refused["gate"]["comparisons"]}
    assert bars == {"live version 1": "worse", "the logging policy": "better"}
    assert store.live().version == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("limits", [None, (0.0, 1.0)])
def test_the_better_one_of_two_is_published(tmp_path: Path, limits: Any) -> None:
    """It is better than both bars; published again, it is live already."""
    uniform_log(tmp_path, [0.87, 0.62, 0.06, 0.06], n=8000)
    WeightStore(tmp_path, "default").publish(
        stored(tmp_path, probabilities(0.01, 0.97, 0.01, 0.01))
    )
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    done = publish(tmp_path, "default", digest, Gate(reward_range=limits))
    assert (done["published"], done["version"], done["gate"]["verdict"]) == (True, 2, "better")
    assert done["gate"]["approximate"] == (limits is None)
    again = publish(tmp_path, "default", digest, Gate(reward_range=limits))
    assert (again["published"], again["version"], again["gate"]) == (True, 2, None)
    assert again["already_live"]
    assert len(load_decisions(tmp_path, "default").known) == 1  # nothing was decided again


def test_a_pinned_policy_is_not_judged(tmp_path: Path) -> None:
    """The refusal comes first, so that no look at the held-out episodes is spent."""
    uniform_log(tmp_path, [0.87, 0.62, 0.06, 0.06], n=300)
    store = WeightStore(tmp_path, "default")
    store.publish(stored(tmp_path, probabilities(0.01, 0.97, 0.01, 0.01)))
    store.pause(why="a review")
    with pytest.raises(PolicyPinned, match="a review"):
        publish(tmp_path, "default", stored(tmp_path, probabilities(0.97, *[0.01] * 3)), Gate())
    assert load_decisions(tmp_path, "default").known == ()


def test_one_effective_episode_is_no_value(tmp_path: Path) -> None:
    """If one long episode has nearly all the weight, WIS has an infinite interval."""
    rng, n, steps = np.random.default_rng(3), 120, 60
    obs = rng.normal(size=(n, steps, 2))
    actions = rng.integers(4, size=(n, steps))
    log_episodes(tmp_path, obs, actions, np.ones((n, steps)), np.full((n, steps), 0.25))
    digest = stored(tmp_path, [[3.0, -3.0, 0, 0], [0, 0, 3.0, -3.0]])
    result = judged(tmp_path, digest, split="all")
    assert result.ess < 2
    assert estimate_of(result, "wis").interval == (-math.inf, math.inf)
    assert result.judgement.verdict == "cannot tell"
    assert "effective sample size" in " ".join(result.judgement.reasons)
    assert not publish(tmp_path, "default", digest, Gate())["published"]


def test_a_greedy_log_is_left_out_by_name(tmp_path: Path) -> None:
    """Rows of probability 1 have normal weights, but carry no information about other actions."""
    rng, n = np.random.default_rng(4), 2000
    obs, actions = rng.normal(size=(n, 1, 2)), np.zeros((n, 1), np.int64)
    log_episodes(tmp_path, obs, actions, rng.random((n, 1)), np.ones((n, 1)))
    uniform_log(tmp_path, [0.5, 0.9, 0.5, 0.5], n=1000, first=n)
    digest = stored(tmp_path, probabilities(0.01, 0.97, 0.01, 0.01))
    result = judged(tmp_path, digest, split="all")
    assert (result.excluded, result.episodes) == ({"certain": n}, 1000)
    assert result.judgement.verdict == "cannot tell"
    assert "2,000 episodes (66.7%) with steps of probability 1" in " ".join(
        result.judgement.reasons
    )


@pytest.mark.parametrize("weighed", [True, False])
def test_sampled_logging_is_weighed(tmp_path: Path, weighed: bool) -> None:
    """Action 0 is good where a tenth is logged, and bad where all is: it is good overall."""
    rng, n = np.random.default_rng(5), 30_000
    rare = rng.random(n) < 0.5
    kept = ~rare | (rng.random(n) < 0.1)
    actions = rng.integers(4, size=(n, 1))
    mean = 0.5 + np.where(rare, 0.4, -0.2)[:, None] * (actions == 0)
    rewards = (rng.random((n, 1)) < mean).astype(np.float64)
    given = (rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25))
    pass_prob = np.where(rare & weighed, 0.1, 1.0)[kept]
    log_episodes(tmp_path, *(column[kept] for column in given), pass_prob=pass_prob)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    result = judged(tmp_path, digest, split="all", reward_range=(0.0, 1.0))
    assert result.judgement.verdict == ("better" if weighed else "worse")
    if weighed:
        truth = 0.5 + 0.97 * 0.1
        for name in ("ips", "snips", "dr"):
            assert (
                abs(estimate_of(result, name).value - truth) < 4 * estimate_of(result, name).stderr
            )
        assert abs(result.judgement.comparisons[0].difference - 0.072) < 0.1


def test_users_are_held_out_and_judged_whole(tmp_path: Path) -> None:
    """The episodes of one user, by a tag, are held out together and judged as one number."""
    rng, n = np.random.default_rng(8), 4000
    actions = rng.integers(4, size=(n, 1))
    rewards = (rng.random((n, 1)) < np.array([0.8, 0.4, 0.4, 0.4])[actions]).astype(np.float64)
    tags = [json.dumps({"user": f"u{i % 200}"}) for i in range(n)]
    given = (rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25))
    log_episodes(tmp_path, *given, tags=tags)
    trained = train(
        tmp_path,
        "default",
        BanditConfig(lr=1e-2, epochs=3),
        settings=TrainSettings(cluster="tag:user"),
    )
    assert trained.rows_trained % 20 == trained.rows_held_out % 20 == 0
    result = judged(tmp_path, trained.candidate, reward_range=(0.0, 1.0), min_ess=30)
    assert (result.episodes, result.cluster) == (trained.rows_held_out, "tag:user")
    (found,) = result.judgement.comparisons
    assert (found.n, found.unit) == (trained.rows_held_out // 20, "held-out values of tag:user")
    single = judged(tmp_path, trained.candidate, split="all", cluster="").judgement
    (note,) = (one for one in single.diagnostics if one.name == "repeated_tag")
    assert note.sentence == "20 episodes per value of `user`: --cluster tag:user"
    with pytest.raises(ValueError, match=r"tag of the episodes, \['user'\], got 'usr'"):
        train(
            tmp_path, "default", BanditConfig(epochs=1), settings=TrainSettings(cluster="tag:usr")
        )
    with pytest.raises(ValueError, match=r"tag of the episodes, \['user'\], got 'usr'"):
        publish(tmp_path, "default", trained.candidate, Gate(cluster="tag:usr"))
    assert load_decisions(tmp_path, "default").known == ()


def test_another_unit_than_before_is_noted(tmp_path: Path) -> None:
    """After a judgement by a tag, one by single episodes says so: if the live version was trained
    with the tag, and if only an earlier decision was made by it."""
    rng, n = np.random.default_rng(8), 2000
    actions = rng.integers(4, size=(n, 1))
    tags = [json.dumps({"user": f"u{i % 200}"}) for i in range(n)]
    rewards = (actions == 0).astype(np.float64)
    given = (rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25))
    log_episodes(tmp_path, *given, tags=tags)
    config = BanditConfig(lr=1e-2, epochs=1)
    single = train(tmp_path, "default", config).candidate
    settings = Gate(min_ess=30)
    by_user = publish(tmp_path, "default", single, replace(settings, cluster="tag:user"))
    assert by_user["notes"] == []
    again = train(tmp_path, "default", config, settings=TrainSettings(seed=1)).candidate
    by_tag = (
        f"candidate {single[:12]} was judged by tag:user; this judgement counts single episodes"
    )
    assert by_tag in publish(tmp_path, "default", again, settings)["notes"]
    users = train(tmp_path, "default", config, settings=TrainSettings(cluster="tag:user")).candidate
    publish(tmp_path, "default", users, None)
    result = evaluate(tmp_path, "default", again)
    (note,) = (one for one in result.judgement.diagnostics if one.name == "other_unit")
    assert note.passed
    assert note.sentence.startswith("live version 2 was trained with tag:user; this judgement")
    result = judged(tmp_path, again, cluster="tag:user")
    assert "other_unit" not in {one.name for one in result.judgement.diagnostics}


@pytest.mark.parametrize(("tagged", "verdict"), [(3, "cannot tell"), (5, "better"), (9, "better")])
def test_most_episodes_need_the_tag_of_their_unit(
    tagged: int, verdict: str, tmp_path: Path
) -> None:
    """Episodes without the tag count as units of their own; if they are most, a check fails."""
    rng, n = np.random.default_rng(8), 4000
    actions = rng.integers(4, size=(n, 1))
    rewards = (rng.random((n, 1)) < np.array([0.8, 0.4, 0.4, 0.4])[actions]).astype(np.float64)
    tags = [json.dumps({"user": f"u{i}"} if i % 10 < tagged else {}) for i in range(n)]
    given = (rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25))
    log_episodes(tmp_path, *given, tags=tags)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    how = EvaluationSettings(split="all", cluster="tag:user", reward_range=(0.0, 1.0))
    judgement = evaluate(tmp_path, "default", digest, how).judgement
    (check,) = (one for one in judgement.diagnostics if one.name == "without_tag")
    assert (judgement.verdict, check.passed) == (verdict, verdict == "better")
    lacking = f"{4000 - 400 * tagged:,} episodes ({1 - tagged / 10:.1%}) without the tag 'user'"
    assert check.sentence.startswith(lacking)


def test_episodes_of_a_period_are_chosen(tmp_path: Path) -> None:
    """Training and judging select episodes with since <= ts < until."""
    uniform_log(tmp_path, [0.8, 0.4, 0.4, 0.4], n=2000)
    trained = train(tmp_path, "default", BanditConfig(epochs=1), settings=TrainSettings(until=1000))
    assert trained.rows_trained + trained.rows_held_out == 1000
    later = judged(tmp_path, trained.candidate, split="all", since=1000)
    assert (later.episodes, later.excluded) == (1000, {})


def test_what_clients_dropped_is_counted(tmp_path: Path) -> None:
    """Dropped episodes leave no rows; a check fails if the clients report too many."""
    uniform_log(tmp_path, [0.8, 0.4, 0.4, 0.4], n=1900)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    for steps, verdict in ((90, "better"), (110, "cannot tell")):
        say_dropped(tmp_path, "0123456789ab", {"client": Lost(episodes=40, steps=steps)})
        found = judged(tmp_path, digest, split="all").judgement
        (check,) = (one for one in found.diagnostics if one.name == "client_dropped")
        assert (found.verdict, check.passed) == (verdict, verdict == "better")
        assert check.sentence.startswith(f"{steps} steps (")
        assert ("fix what fills their queues" in check.sentence) == (not check.passed)


def test_rewards_that_came_too_late_are_counted(tmp_path: Path) -> None:
    """Collectors count them by version, delay and action; more than 1 % of steps is too many."""
    uniform_log(tmp_path, [0.8, 0.4, 0.4, 0.4], n=2000)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    kind = LateReward("default", 1, "an hour", 0)
    other = kind._replace(policy_id="other")
    for number, verdict in ((20, "better"), (21, "cannot tell")):
        say_late(tmp_path, "0123456789ab", {kind: number, other: 500})
        found = judged(tmp_path, digest, split="all").judgement
        (check,) = (one for one in found.diagnostics if one.name == "late_rewards")
        assert (found.verdict, check.passed) == (verdict, verdict == "better")
    assert "21 of version 1, after an hour, action 0" in check.sentence


def test_nothing_reserved_cannot_be_judged(tmp_path: Path) -> None:
    """If training held out nothing, the verdict is `cannot tell`, with that reason."""
    uniform_log(tmp_path, [0.8, 0.4, 0.4, 0.4], n=400)
    trained = train(
        tmp_path, "default", BanditConfig(epochs=1), settings=TrainSettings(evaluation_share=0.0)
    )
    found = evaluate(tmp_path, "default", trained.candidate).judgement
    assert found.verdict == "cannot tell"
    assert any(
        reason.startswith("nothing_reserved: nothing was reserved") for reason in found.reasons
    )


def test_nothing_that_was_trained_on_is_judged_by(tmp_path: Path) -> None:
    """Episodes in the lineage of the candidate or the live version are excluded and counted."""
    uniform_log(tmp_path, [0.8, 0.4, 0.4, 0.4], n=3000)
    store = WeightStore(tmp_path, "default")
    store.publish(stored(tmp_path, np.zeros(4), {STREAM: [[0, 499]]}))
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01), {STREAM: [[500, 1999]]})
    result = judged(tmp_path, digest, split="all")
    assert (result.excluded, result.episodes) == ({"in_lineage": 2000}, 1000)
    assert result.rows == {STREAM: [2000, 2999]}
    assert result.judgement.verdict == "better"
    greedy = stored(tmp_path, probabilities(0.94, 0.02, 0.02, 0.02), {STREAM: [[0, 2999]]})
    nothing = judged(tmp_path, greedy, split="all")
    assert nothing.judgement.verdict == "cannot tell"
    assert "nothing was reserved" in " ".join(nothing.judgement.reasons)


def test_looks_and_candidates_are_counted(tmp_path: Path) -> None:
    """Judging more episodes is a further look; judging the same ones again is not.

    Other candidates that were judged count too.
    """
    gate = Gate(reward_range=(0.0, 1.0))
    uniform_log(tmp_path, [0.52, 0.5, 0.5, 0.5], n=1000)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    other = stored(tmp_path, probabilities(0.01, 0.97, 0.01, 0.01))
    first, again = (publish(tmp_path, "default", digest, gate)["gate"] for _ in range(2))
    assert (first["verdict"], first["looks"], again["looks"]) == ("cannot tell", 0, 0)
    assert again["comparisons"] == first["comparisons"]
    assert first["comparisons"][0]["bound"] == "betting"
    assert publish(tmp_path, "default", other, gate)["gate"]["others"] == 1
    uniform_log(tmp_path, [0.52, 0.5, 0.5, 0.5], n=3000, seed=9, first=1000)
    later = publish(tmp_path, "default", digest, gate)["gate"]
    assert (later["looks"], later["others"]) == (1, 1)
    (bound,) = later["comparisons"]
    assert bound["bound"] == "sequence"
    spent = publish(tmp_path, "default", digest, Gate(reward_range=(0.0, 1.0), alpha_budget=0.05))
    # The second candidate gets 6 / (2 pi)^2 of the budget; a later look a tenth of that.
    assert spent["gate"]["comparisons"][0]["error"] == pytest.approx(
        0.1 * 0.05 * 6 / (4 * np.pi**2)
    )
    kept = load_decisions(tmp_path, "default").known
    assert [one["verdict"] for one in kept] == ["cannot tell"] * 5
    assert kept[0]["candidate"] == digest
    assert all(one["diagnostics"] for one in kept)


def test_the_same_episodes_by_other_settings_are_a_further_look(tmp_path: Path) -> None:
    """After a refusal with a range, judging without one is a second try, and has a second look's
    error, split, not sequential. Each repetition gives what it gave before."""
    uniform_log(tmp_path, [0.52, 0.5, 0.5, 0.5], n=1000)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    ranged, free = Gate(reward_range=(0.0, 1.0)), Gate(reward_range=None)
    gates = [publish(tmp_path, "default", digest, gate)["gate"] for gate in (ranged, free) * 2]
    assert [gate["looks"] for gate in gates] == [0, 1, 0, 1]
    assert gates[:2] == gates[2:]
    (first,), (second,) = (gate["comparisons"] for gate in gates[:2])
    assert (first["bound"], second["bound"]) == ("betting", "student")
    assert (first["error"], second["error"]) == pytest.approx((0.8 * 0.025, 0.1 * 0.025))
    uniform_log(tmp_path, [0.52, 0.5, 0.5, 0.5], n=1000, seed=9, first=1000)
    (third,) = publish(tmp_path, "default", digest, ranged)["gate"]["comparisons"]
    assert (third["bound"], third["error"]) == ("betting", pytest.approx(0.05 * 0.025))


def test_a_reward_outside_its_range_is_named(tmp_path: Path) -> None:
    """A log that breaks its declared range gets no bound, and no error."""
    uniform_log(tmp_path, [0.9, 0.5, 0.5, 0.5], n=1000)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    found = judged(tmp_path, digest, split="all", reward_range=(0.0, 0.5)).judgement
    assert found.verdict == "cannot tell"
    assert "outside of the declared range 0 to 0.5" in " ".join(found.reasons)


def test_a_judgement_without_an_interval_is_no_look(tmp_path: Path) -> None:
    """A judgement that fails before any difference is computed does not count as a look."""
    uniform_log(tmp_path, [0.9, 0.5, 0.5, 0.5], n=1000)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    wrong = publish(tmp_path, "default", digest, Gate(reward_range=(0.0, 0.5)))["gate"]
    assert (wrong["verdict"], wrong["comparisons"]) == ("cannot tell", [])
    uniform_log(tmp_path, [0.9, 0.5, 0.5, 0.5], n=1000, seed=9, first=1000)
    right = publish(tmp_path, "default", digest, Gate(reward_range=(0.0, 1.0)))["gate"]
    assert (right["looks"], right["comparisons"][0]["bound"]) == (0, "betting")


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (ActionRule("sample"), 0.25),
        (ActionRule("epsilon_greedy"), 0.05 * 0.25 + 0.95 * 0.4),
        (ActionRule("greedy"), 0.4),
    ],
    ids=str,
)
def test_a_candidate_is_judged_by_its_rule(tmp_path: Path, rule: ActionRule, value: float) -> None:
    """With nearly equal action values, `greedy` takes the best action, and `sample` takes any.

    The IPS estimate is within 5 standard errors of the rule's value, and the verdict follows the
    rule.
    """
    uniform_log(tmp_path, [0.4, 0.2, 0.2, 0.2], n=8000)
    digest = stored(tmp_path, [0.001, 0.0, 0.0, 0.0], rule=rule)
    found = judged(tmp_path, digest, split="all", reward_range=(0.0, 1.0))
    ips = estimate_of(found, "ips")
    assert abs(ips.value - value) < 5 * ips.stderr
    verdict = "cannot tell" if rule.kind == "sample" else "better"
    assert found.judgement.verdict == verdict


def test_after_greedy_only_a_canary_can_judge(tmp_path: Path) -> None:
    """Publishing a greedy policy gives a note; its log has propensities of 1 and judges nothing."""
    digest = stored(tmp_path, [1.0, 0.0, 0.0, 0.0], rule=ActionRule("greedy"))
    done = publish(tmp_path, "default", digest, None)
    assert (done["action_rule"], done["notes"]) == ({"kind": "greedy"}, [WITHOUT_EXPLORATION])
    n, rng = 500, np.random.default_rng(4)
    actions = np.zeros((n, 1), np.int64)
    obs = rng.normal(size=(n, 1, 2))
    log_episodes(tmp_path, obs, actions, rng.random((n, 1)), np.ones((n, 1)))
    following = stored(tmp_path, [0.0, 1.0, 0.0, 0.0], rule=ActionRule("epsilon_greedy"))
    refused = publish(tmp_path, "default", following, Gate())
    assert (refused["published"], refused["notes"]) == (False, [])
    reasons = " ".join(refused["gate"]["reasons"])
    assert "episodes (100.0%) with steps of probability 1" in reasons
    assert "use a canary" in reasons


def test_a_greedy_continuous_policy_cannot_be_judged(tmp_path: Path) -> None:
    """A greedy action has no density: as candidate and as live version it needs a canary."""
    action = Box((1,), "float64")
    spec = PolicySpec(SPACES[0], action, ModuleSpec(hidden=(), value_head=False))
    save_declaration(tmp_path, PolicyDeclaration(observation=SPACES[0], action=action))
    schema, n, rng = schema_id(SPACES[0], action), 300, np.random.default_rng(6)
    values = rng.normal(size=n)
    parts = [
        Part(
            episode_id=f"e{i}",
            part=0,
            t0=0,
            steps=1,
            schema_id=schema,
            obs=np.zeros(2, np.float32).tobytes(),
            actions=values[i : i + 1].tobytes(),
            rewards=np.float64(-abs(values[i])).tobytes(),
            action_logp=np.float64(-0.5 * (values[i] ** 2 + np.log(2 * np.pi))).tobytes(),
            policy_version=np.int64(-1).tobytes(),
            source=b"\1",
            pass_prob=np.float64(1).tobytes(),
            ts=np.int64(i).tobytes(),
            received_ts=np.int64(i).tobytes(),
            ended="terminated",
            ordinal=i,
            episode_ordinal=i,
        )
        for i in range(n)
    ]
    stream = f"0123456789ab-{schema}"
    ShardWriter(tmp_path / "shards").write(stream, canonical_json(SPACES[0], action), parts)
    store = WeightStore(tmp_path, "default")
    weights = Policy(spec).get_weights()
    found = {}
    for rule in (ActionRule("greedy"), ActionRule("sample", temperature=0.5)):
        document = replace(spec, action_rule=rule).to_json()
        digest = store.add_candidate(weights, spec=document, metrics={}, lineage={})
        found[rule.kind] = judged(tmp_path, digest, split="all")
        if rule.kind == "greedy":
            store.publish(digest)
    for kind, name in (("greedy", "no_density"), ("sample", "live_no_density")):
        judgement = found[kind].judgement
        assert judgement.verdict == "cannot tell"
        assert any(one.startswith(f"{name}: ") and "canary" in one for one in judgement.reasons)
    assert found["greedy"].behaviour is not None
    assert "no density" in found["greedy"].unavailable["ips"]
    # N(0, 1) at half of its deviation: mean |x| halves
    ips = estimate_of(found["sample"], "ips")
    assert abs(ips.value + 0.5 * np.sqrt(2 / np.pi)) < 5 * ips.stderr


def test_propensities_that_are_too_low_are_named(tmp_path: Path) -> None:
    """The log took action 0 in 70 % and says 25 %; the candidate's weights have mean 1."""
    rng, n = np.random.default_rng(8), 4000
    actions = rng.choice(4, p=[0.7, 0.1, 0.1, 0.1], size=(n, 1))
    rewards = (rng.random((n, 1)) < np.array([0.9, 0.64, 0, 0])[actions]).astype(np.float64)
    log_episodes(tmp_path, rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25))
    digest = stored(tmp_path, probabilities(0.25, 0.73, 0.01, 0.01))
    found = judged(tmp_path, digest, split="all", reward_range=(0.0, 1.0)).judgement
    failed = [one for one in found.diagnostics if not one.passed]
    assert [one.name for one in failed] == ["propensities"]
    assert failed[0].value == pytest.approx(2.8, abs=0.1)


@pytest.mark.parametrize("whose", ["one action", "all alike"])
def test_failures_that_never_end_make_no_action_better(tmp_path: Path, whose: str) -> None:
    """All actions earn .75. 1.5 % of the episodes, failures, are abandoned.

    Without them, the first action would earn .8 if they were all its own.
    """
    rng, n = np.random.default_rng(8), 8000
    actions = rng.integers(4, size=(n, 1))
    rewards = (rng.random((n, 1)) < 0.75).astype(np.float64)
    chance = 0.24 * (actions == 0) if whose == "one action" else np.full((n, 1), 0.06)
    lost = ((rewards == 0) & (rng.random((n, 1)) < chance))[:, 0]
    given = (rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25))
    log_episodes(tmp_path, *given, lost=lost)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    found = judged(tmp_path, digest, split="all", reward_range=(0.0, 1.0)).judgement
    assert found.verdict == "cannot tell"
    failed = [one.name for one in found.diagnostics if not one.passed]
    assert failed == (["lost_by_action"] if whose == "one action" else [])
    assert found.comparisons[0].interval[0] < -0.01
    left_out = tmp_path / "left_out"
    log_episodes(left_out, *(one[~lost] for one in given))
    digest = stored(left_out, probabilities(0.97, 0.01, 0.01, 0.01))
    found = judged(left_out, digest, split="all", reward_range=(0.0, 1.0)).judgement
    low = found.comparisons[0].interval[0]
    assert (low > -0.01) == (whose == "one action")


def test_what_changed_at_the_end_of_a_log_is_named(tmp_path: Path) -> None:
    """The first action earns .9, in the last fifth .2, where the second feature rose by 1, too."""
    rng, n = np.random.default_rng(4), 3000
    late = np.arange(n) >= 0.8 * n
    actions = rng.integers(4, size=(n, 1))
    means = np.where(actions == 0, np.where(late, 0.2, 0.9)[:, None], 0.5)
    rewards = (rng.random((n, 1)) < means).astype(np.float64)
    obs = rng.normal(size=(n, 1, 2))
    obs[late, :, 1] += 1.0
    probs = np.full((n, 1), 0.25)
    log_episodes(tmp_path, obs, actions, rewards, probs)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    asked = EvaluationSettings(split="all", reward_range=(0.0, 1.0))
    found = evaluate(tmp_path, "default", digest, asked).judgement
    assert found.comparisons[0].verdict == "better"
    assert found.verdict == "cannot tell"
    checks = {one.name: one for one in found.diagnostics}
    assert [name for name, one in checks.items() if not one.passed] == ["last_fifth"]
    assert "feature 1 of the observations moved by" in checks["context_drift"].sentence
    earlier = replace(asked, until=int(0.8 * n))
    before = evaluate(tmp_path, "default", digest, earlier).judgement
    assert before.verdict == "better"
    (note,) = (one for one in before.diagnostics if one.name == "context_drift")
    assert "deviations after the judged log" in note.sentence
