"""Evaluation by held-out episodes: known values are covered, and exclusions are counted.

Also of `policy.judging.judged_log`.
"""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from policy.algorithms.bandit import BanditConfig
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.judging.evaluate import evaluate
from policy.judging.report import plot_intervals
from policy.judging.settings import EvaluationSettings
from policy.networks.policy import Policy
from policy.ope.episodes import Episodes
from policy.ope.estimators import ESTIMATORS
from policy.training.settings import TrainSettings
from policy.training.train import train
from storage.errors import NothingYet
from storage.experience.episode import Part
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id
from tests.policy.judging.test_evaluate_verdicts import (
    estimate_of,
    log_episodes,
    probabilities,
    stored,
)

SPEC = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(), value_head=False))


def store_best(root, slope=8.0):
    """A hand-made candidate that is almost the best policy for the log: it earns about 0.85."""
    weights = {
        "pi.0.weight": np.array([[slope, 0], [0, 0], [-slope, 0]], np.float32),
        "pi.0.bias": np.array([0, -5, 0], np.float32),
    }
    return WeightStore(root, "default").add_candidate(
        weights, spec=SPEC.to_json(), metrics={}, lineage={}
    )


def true_value(slope=8.0):
    """The candidate's expected reward, by Monte Carlo over the problem itself."""
    policy, x = Policy(SPEC), np.random.default_rng(5).normal(size=(200_000, 2)).astype(np.float32)
    weights = {
        "pi.0.weight": np.array([[slope, 0], [0, 0], [-slope, 0]], np.float32),
        "pi.0.bias": np.array([0, -5, 0], np.float32),
    }
    policy.set_weights(weights)
    best = np.where(x[:, 0] > 0, 0, 2)
    return 0.9 * policy.to_numpy().probabilities(x)[np.arange(len(x)), best].mean()


def test_estimates_cover_the_known_value_of_a_known_policy(bandit_log, tmp_path):
    """The estimates and the logging policy's value are within 4 standard errors of the truth."""
    bandit_log(6000).write(tmp_path)
    result = evaluate(
        tmp_path, "default", store_best(tmp_path), settings=EvaluationSettings(split="all")
    )
    found = {one.name: one for one in result.target}
    assert set(found) == {"ips", "snips", "dm", "dr"}
    for name in ("ips", "snips", "dr"):
        assert abs(found[name].value - true_value()) < 4 * found[name].stderr
    assert abs(result.behaviour.value - 0.18) < 4 * result.behaviour.stderr
    assert result.episodes == found["dr"].n == 6000
    assert 0 < result.ess < 6000
    assert (result.judgement.verdict, result.judgement.approximate) == ("better", True)


def test_it_judges_by_the_episodes_that_training_held_out(bandit_log, tmp_path):
    """The candidate stores the share; trained and judged episodes make the whole log."""
    bandit_log(2000).write(tmp_path)
    trained = train(
        tmp_path, "default", BanditConfig(lr=3e-3), settings=TrainSettings(evaluation_share=0.4)
    )
    result = evaluate(tmp_path, "default", trained.candidate)
    assert result.evaluation_share == 0.4
    assert result.episodes == trained.rows_held_out
    assert result.episodes + trained.rows_trained == 2000
    assert result.not_read == {"not_held_out": trained.rows_trained}
    assert estimate_of(result, "snips").value > 2 * result.behaviour.value


def test_episodes_that_cannot_be_used_are_counted_by_reason(bandit_log, tmp_path):
    """Unfinished episodes and those without propensity are excluded, abandoned ones are not."""
    log = bandit_log(500)
    log.ended[0:5] = ["abandoned"] * 5
    log.ended[20] = "broken"
    log.rewards[[0, 20]] = 100.0  # what a lost episode earned does not count
    log.ended[6:8] = [None] * 2
    log.logp[4:20] = np.nan
    log.write(tmp_path)
    result = evaluate(
        tmp_path, "default", store_best(tmp_path), settings=EvaluationSettings(split="all")
    )
    assert result.excluded == {"unfinished": 2, "no_propensity": 14}
    assert {one.n for one in (*result.target, result.behaviour)} == {484}
    assert result.behaviour.value < 1
    (check,) = (one for one in result.judgement.diagnostics if one.name == "lost_episodes")
    assert (check.value, check.passed) == (5 / 500, True)


@pytest.mark.parametrize(
    ("column", "number"),
    [("obs", 3e38), ("rewards", 1e20), ("rewards", -1e308), ("logp", -100.0), ("logp", -1e39)],
)
def test_numbers_beyond_float32_leave_out_their_episodes(bandit_log, tmp_path, column, number):
    """A reward, a weight, or what the network makes of an observation: the others are judged as if
    these episodes were not in the log."""
    log = bandit_log(1000)
    getattr(log, column)[[3, 400, 999]] = number
    log.write(tmp_path / "odd")
    digest = store_best(tmp_path / "odd")
    odd = evaluate(tmp_path / "odd", "default", digest, settings=EvaluationSettings(split="all"))
    log = bandit_log(1000)
    log.ended = [None if i in (3, 400, 999) else "terminated" for i in range(1000)]
    log.write(tmp_path / "without")
    without = evaluate(
        tmp_path / "without",
        "default",
        store_best(tmp_path / "without"),
        settings=EvaluationSettings(split="all"),
    )
    assert (odd.excluded, without.excluded) == ({"not_finite": 3}, {"unfinished": 3})
    assert (odd.target, odd.unavailable) == (
        tuple(replace(one, excluded=odd.excluded) for one in without.target),
        {},
    )
    assert odd.judgement.verdict == "better"
    assert odd.judgement.comparisons == without.judgement.comparisons


def test_an_observation_beyond_float32_leaves_out_its_episode(tmp_path):
    """A Box of float64 accepts 1e39; neither the candidate nor the live version can act on it."""
    spaces, n = (Box((2,), "float64"), Discrete(4)), 400
    rng = np.random.default_rng(0)
    obs, actions = rng.normal(size=(n, 1, 2)), rng.integers(4, size=(n, 1))
    obs[7] = 1e39
    rewards = (rng.random((n, 1)) < np.array([0.9, 0.1, 0.1, 0.1])[actions]).astype(float)
    log_episodes(tmp_path, obs, actions, rewards, np.full((n, 1), 0.25), spaces=spaces)
    spec = PolicySpec(*spaces, ModuleSpec(hidden=(), value_head=False))
    live = stored(tmp_path, probabilities(0.1, 0.3, 0.3, 0.3), spec=spec)
    WeightStore(tmp_path, "default").publish(live)
    digest = stored(tmp_path, probabilities(0.7, 0.1, 0.1, 0.1), spec=spec)
    result = evaluate(
        tmp_path,
        "default",
        digest,
        settings=EvaluationSettings(split="all", reward_range=(0.0, 1.0)),
    )
    assert (result.episodes, result.excluded) == (n - 1, {"not_finite": 1})
    assert result.judgement.verdict == "better"


def test_a_network_that_overflows_leaves_out_the_episode(tmp_path):
    """The live version's weights make infinity of an observation that the candidate can read."""
    rng, n = np.random.default_rng(0), 400
    obs, actions = rng.normal(size=(n, 1, 2)), rng.integers(4, size=(n, 1))
    obs[7] = 1e30
    rewards = (rng.random((n, 1)) < np.array([0.9, 0.1, 0.1, 0.1])[actions]).astype(float)
    log_episodes(tmp_path, obs, actions, rewards, np.full((n, 1), 0.25))
    digest = stored(tmp_path, probabilities(0.7, 0.1, 0.1, 0.1))
    assert (
        evaluate(tmp_path, "default", digest, settings=EvaluationSettings(split="all")).excluded
        == {}
    )
    WeightStore(tmp_path, "default").publish(stored(tmp_path, np.eye(2, 4) * 1e9))
    result = evaluate(tmp_path, "default", digest, settings=EvaluationSettings(split="all"))
    assert (result.episodes, result.excluded) == (n - 1, {"not_finite": 1})
    assert result.judgement.verdict == "better"


@pytest.mark.parametrize(("odd", "passed"), [(50, True), (51, False)])
def test_many_episodes_beyond_float32_give_no_verdict(bandit_log, tmp_path, odd, passed):
    """More than 5 % of them end in `cannot tell`, which counts them."""
    log = bandit_log(1000)
    log.rewards[:odd] = 1e39
    log.write(tmp_path)
    found = evaluate(
        tmp_path, "default", store_best(tmp_path), settings=EvaluationSettings(split="all")
    ).judgement
    [check] = [one for one in found.diagnostics if one.name == "not_finite"]
    assert check.passed is passed
    told = f"{odd} episodes ({odd / 1000:.1%}) with numbers beyond float32"
    assert check.sentence.startswith(told)
    assert found.verdict == ("better" if passed else "cannot tell")


def test_a_reward_beyond_float32_breaks_the_promised_range(bandit_log, tmp_path):
    """Its episode is left out, but the range was promised for it, too."""
    log = bandit_log(1000)
    log.rewards[7] = 1e39
    log.write(tmp_path)
    digest = store_best(tmp_path)
    result = evaluate(
        tmp_path,
        "default",
        digest,
        settings=EvaluationSettings(split="all", reward_range=(0.0, 1.0)),
    )
    assert result.excluded == {"not_finite": 1}
    assert result.judgement.verdict == "cannot tell"
    assert "1 reward outside of the declared range" in " ".join(result.judgement.reasons)


def test_the_result_is_strict_json_and_reproducible(bandit_log, tmp_path):
    """to_dict has no NaN; bootstrap intervals are fixed by the seed."""
    bandit_log(300).write(tmp_path)
    digest = store_best(tmp_path)

    def run(seed):
        result = evaluate(
            tmp_path,
            "default",
            digest,
            settings=EvaluationSettings(interval="bootstrap", seed=seed),
        )
        return json.dumps(result.to_dict(), allow_nan=False)

    assert run(1) == run(1) != run(2)


def test_versions_and_the_live_one_are_judged_too(bandit_log, tmp_path):
    """A number names a version. The default is the live version; without one, it raises."""
    bandit_log(100).write(tmp_path)
    digest = store_best(tmp_path)
    with pytest.raises(NothingYet, match="expected a live version"):
        evaluate(tmp_path, "default")
    version = WeightStore(tmp_path, "default").publish(digest).version
    assert evaluate(tmp_path, "default", version).weights == version
    assert evaluate(tmp_path, "default").weights == version


def test_weights_are_judged_on_another_log(bandit_log, tmp_path):
    """`store` says where the weights are, if the log is under another root."""
    bandit_log(400, seed=1).write(tmp_path / "home")
    bandit_log(400, seed=2).write(tmp_path / "away")
    store = WeightStore(tmp_path / "home", "default")
    digest = store_best(tmp_path / "home")
    away = evaluate(
        tmp_path / "away", "default", digest, settings=EvaluationSettings(split="all"), store=store
    )
    home = evaluate(tmp_path / "home", "default", digest, settings=EvaluationSettings(split="all"))
    assert estimate_of(away, "dr").interval[0] < estimate_of(home, "dr").interval[1]
    assert estimate_of(home, "dr").interval[0] < estimate_of(away, "dr").interval[1]
    assert away.behaviour.value != home.behaviour.value


def test_what_cannot_be_computed_is_named(bandit_log, tmp_path):
    """An estimator that fails is named and stops no other; an unknown name raises."""
    log = bandit_log(1)
    log.write(tmp_path)
    digest = store_best(tmp_path)
    result = evaluate(
        tmp_path,
        "default",
        digest,
        settings=EvaluationSettings(split="all", estimators=["ips", "dr"]),
    )
    assert list(result.unavailable) == ["dr"]
    assert "2 or more episodes" in result.unavailable["dr"]
    alone = evaluate(
        tmp_path, "default", digest, settings=EvaluationSettings(split="all", estimators=["dr"])
    )
    assert (alone.target, list(alone.unavailable)) == ((), ["dr"])
    with pytest.raises(ValueError, match="estimators: expected names of"):
        evaluate(tmp_path, "default", digest, settings=EvaluationSettings(estimators=["magic"]))


def test_nothing_to_judge_by_is_a_verdict(bandit_log, tmp_path):
    """Without a usable episode the answer is `cannot tell`, with all fields and the exclusions."""
    log = bandit_log(10)
    log.logp[:] = np.nan
    log.write(tmp_path)
    result = evaluate(
        tmp_path, "default", store_best(tmp_path), settings=EvaluationSettings(split="all")
    )
    assert (result.judgement.verdict, result.behaviour, result.target) == ("cannot tell", None, ())
    assert "no_propensity: 10 episodes" in " ".join(result.judgement.reasons)
    full = bandit_log(10)
    full.write(tmp_path / "full")
    whole = evaluate(
        tmp_path / "full",
        "default",
        store_best(tmp_path / "full"),
        settings=EvaluationSettings(split="all"),
    )
    assert result.to_dict().keys() == whole.to_dict().keys()
    plot_intervals([result], tmp_path / "intervals.png")


def test_intervals_are_drawn(bandit_log, tmp_path):
    """A PNG shows several results, also one with an infinite interval."""
    bandit_log(50).write(tmp_path)
    result = evaluate(
        tmp_path, "default", store_best(tmp_path), settings=EvaluationSettings(split="all")
    )
    endless = replace(
        result, label="one", behaviour=replace(result.behaviour, interval=(-np.inf, np.inf))
    )
    plot_intervals([result, endless], tmp_path / "intervals.png")
    data = (tmp_path / "intervals.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000


def write_long_episodes(root, lengths, *, cut=(), gone=()):
    """Episodes of several steps; `cut` ones lie in two parts, `gone` ones lack the first part."""
    rng, canonical = np.random.default_rng(0), canonical_json(Box((2,)), Discrete(3, 1))
    schema = schema_id(Box((2,)), Discrete(3, 1))
    columns, parts, ordinal = [], [], 0
    for i, steps in enumerate(lengths):
        obs = rng.normal(size=(steps, 2)).astype(np.float32)
        actions, rewards = rng.integers(1, 4, steps), rng.normal(size=steps)
        columns.append((obs, actions, rewards))
        runs = [(0, 2), (2, steps)] if i in cut or i in gone else [(0, steps)]
        first = ordinal
        for number, (a, b) in enumerate(runs):
            part = Part(
                episode_id=f"e{i}",
                part=number,
                t0=a,
                steps=b - a,
                schema_id=schema,
                obs=obs[a:b].tobytes(),
                actions=actions[a:b].tobytes(),
                rewards=rewards[a:b].tobytes(),
                action_logp=np.full(b - a, np.log(1 / 3)).tobytes(),
                policy_version=np.zeros(b - a, np.int64).tobytes(),
                source=b"\0" * (b - a),
                pass_prob=np.ones(b - a).tobytes(),
                ts=np.zeros(b - a, np.int64).tobytes(),
                received_ts=np.zeros(b - a, np.int64).tobytes(),
                ended="terminated" if b == steps else None,
                ordinal=ordinal,
                episode_ordinal=first,
            )
            ordinal += 1
            if not (i in gone and number == 0):
                parts.append(part)
    writer = ShardWriter(root / "shards")
    for start in range(0, len(parts), 3):
        writer.write(f"0123456789ab-{schema}", canonical, parts[start : start + 3])
    return columns


def test_long_episodes_are_joined_over_their_parts_and_shards(tmp_path):
    """The estimates equal those of the same episodes given by hand.

    An episode that lacks its first part is excluded.
    """
    lengths = [3, 5, 4, 6, 3, 4]
    columns = write_long_episodes(tmp_path, lengths, cut={1, 3}, gone={2})
    del columns[2], lengths[2]
    result = evaluate(
        tmp_path,
        "default",
        store_best(tmp_path, slope=0.3),
        settings=EvaluationSettings(split="all", gamma=0.9),
    )
    policy = Policy(SPEC)
    _, weights = WeightStore(tmp_path, "default").load_candidate(str(result.weights))
    policy.set_weights(weights)
    obs, actions, rewards = (np.concatenate(each) for each in zip(*columns, strict=True))
    expected = Episodes.from_flat(
        rewards,
        lengths=lengths,
        behaviour_logp=np.full(len(rewards), np.log(1 / 3)),
        target_logp=policy.to_numpy().logp(obs, actions),
    )
    assert result.excluded == {"incomplete": 1}
    assert [one.name for one in result.target] == ["is", "pdis", "wis", "cwpdis"]
    for one in result.target:
        assert one.value == pytest.approx(ESTIMATORS[one.name](expected, gamma=0.9).value)


def test_a_filter_that_training_fitted_is_applied(bandit_log, tmp_path):
    """With observations far from 0, the policy needs its filter's state to tell them apart."""
    log = bandit_log(2000)
    log.obs = log.obs * 100 + 10_000
    log.write(tmp_path)
    spec = replace(SPEC, observation_filter="MeanStdFilter")
    trained = train(tmp_path, "default", BanditConfig(lr=3e-2), spec=spec)
    result = evaluate(tmp_path, "default", trained.candidate)
    assert estimate_of(result, "snips").value > 2 * result.behaviour.value


def test_judging_needs_no_torch():
    """Importing the gate loads neither torch nor a solver, so a small machine can run it."""
    code = "import sys, policy.judging.gate; print({'torch', 'scipy.optimize'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
