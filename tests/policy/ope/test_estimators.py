"""Off-policy estimators: golden numbers, plain loops, properties, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.ope import estimators
from policy.ope.estimators import ESTIMATORS, Episodes, Estimate, StudentT

ROOT = Path(__file__).parents[3]
TINY = json.loads((ROOT / "tests/golden/ope_tiny.json").read_text())
OPEN_BANDIT = json.loads((ROOT / "tests/golden/ope_open_bandit.json").read_text())
SEQUENTIAL = ("is", "pdis", "wis", "cwpdis", "dm", "dr", "v_behavior")
ONE_STEP = ("ips", "snips", "sndr", "switch_dr", "dr_os")

# (rewards, behaviour probabilities, target probabilities, q, v) of one episode
Raw = tuple[list[float], list[float], list[float], list[float], list[float]]


def from_raw(raw: list[Raw], **more: Any) -> Episodes:
    rewards, behaviour, target, q, v = zip(*raw, strict=True)
    with np.errstate(divide="ignore"):
        return Episodes.from_ragged(
            rewards,
            behaviour_logp=[np.log(one) for one in behaviour],
            target_logp=[np.log(one) for one in target],
            q=q,
            v=v,
            **more,
        )


RAGGED: list[Raw] = [
    ([1.0, 0.0, 2.0], [0.5, 0.5, 0.5], [0.8, 0.2, 0.75], [2.0, 1.0, 2.0], [2.0, 1.5, 1.5]),
    ([1.0, 3.0], [0.5, 0.25], [0.2, 0.5], [3.0, 3.0], [2.0, 2.0]),
    ([0.5], [0.9], [0.3], [0.4], [0.6]),
    ([2.0, 1.0, 0.0, 4.0], [0.3, 0.6, 0.9, 0.4], [0.4, 0.5, 0.6, 0.7], [1.0] * 4, [1.5] * 4),
]
BANDIT: list[Raw] = [
    ([1.0], [0.5], [0.8], [0.6], [0.5]),
    ([0.0], [0.5], [0.2], [0.3], [0.5]),
    ([1.0], [0.2], [0.9], [0.7], [0.6]),
    ([0.5], [0.8], [0.1], [0.4], [0.6]),
]


# ------------------------------------------------------------------ golden numbers


def tiny() -> Episodes:
    keys = ("rewards", "pi_b", "pi_e", "q", "v")
    return from_raw([tuple(one[key] for key in keys) for one in TINY["episodes"]])


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_two_episodes_worked_by_hand(name: str) -> None:
    """Every sequential estimator gives the number that was worked out on paper."""
    estimate = ESTIMATORS[name](tiny(), gamma=TINY["gamma"])
    assert estimate.value == pytest.approx(TINY["expected"][name], rel=1e-14)
    weighs = name not in ("dm", "v_behavior")
    assert estimate.ess == pytest.approx(
        TINY["expected"]["ess_trajectory"] if weighs else 2, rel=1e-14
    )
    assert estimate.max_weight == pytest.approx(0.96 if weighs else 1, rel=1e-14)


@pytest.mark.parametrize(("which", "name"), [(0, "A"), (1, "B")])
def test_pdis_of_each_episode_alone(which: int, name: str) -> None:
    """The estimate from a single episode is that episode's term."""
    episode = tiny().without(np.arange(2) != which, "other")
    estimate = estimators.pdis(episode, gamma=0.9)
    assert estimate.value == pytest.approx(TINY["expected"]["pdis_per_episode"][name], rel=1e-14)
    assert estimate.excluded == {"other": 1}


def open_bandit(log: str, target: str) -> Episodes:
    table = pd.read_parquet(ROOT / f"data/open_bandit/{log}_all.parquet")
    actions = table["item_id"].to_numpy()
    clicks = table["click"].to_numpy(dtype=np.float64)
    probs = {"uniform": np.full(80, 1 / 80), "linear": (np.arange(80) + 1) / 3240}[target]
    q = (np.bincount(actions, clicks, 80) + 1) / (np.bincount(actions, minlength=80) + 200)
    return Episodes.one_step(
        clicks,
        behaviour_prob=table["propensity_score"].to_numpy(),
        target_prob=probs[actions],
        q=q[actions],
        v=np.full(len(table), probs @ q),
    )


@pytest.mark.parametrize("case", OPEN_BANDIT["cases"], ids=lambda case: case["log"])
def test_the_real_log_gives_the_published_numbers(case: dict[str, Any]) -> None:
    """Open Bandit Pipeline's numbers on the real log, to the given digits."""
    episodes = open_bandit(case["log"], case["target"])
    results = {name: ESTIMATORS[name](episodes) for name in ("ips", "snips", "dm", "dr", "sndr")}
    results["switch_dr_tau_10"] = estimators.switch_dr(episodes, tau=10)
    results["dr_os_lambda_10"] = estimators.dr_os(episodes, shrinkage=10)
    for name, estimate in results.items():
        assert estimate.value == pytest.approx(case[name], abs=6e-11), name
        assert estimate.n == 10_000
    assert results["ips"].interval == pytest.approx(case["ips_student_t_95"], abs=6e-9)
    assert results["ips"].ess == pytest.approx(case["ess"], abs=0.006)
    digits = len(str(case["max_weight"]).split(".")[1])
    assert results["ips"].max_weight == pytest.approx(case["max_weight"], abs=0.6 * 10**-digits)


@pytest.mark.parametrize("case", OPEN_BANDIT["cases"], ids=lambda case: case["log"])
def test_sequential_estimators_give_the_bandit_numbers(case: dict[str, Any]) -> None:
    """At one step is = pdis = ips and wis = cwpdis = snips; dr and dm are the same function."""
    episodes = open_bandit(case["log"], case["target"])
    for name in ("is", "pdis"):
        assert ESTIMATORS[name](episodes, gamma=0.5).value == pytest.approx(case["ips"], abs=6e-11)
    for name in ("wis", "cwpdis"):
        sequential, bandit = ESTIMATORS[name](episodes, gamma=0.5), estimators.snips(episodes)
        assert sequential.value == pytest.approx(case["snips"], abs=6e-11)
        assert sequential.stderr == pytest.approx(bandit.stderr, rel=1e-12)


# ------------------------------------------------------------------ plain-loop twins


@st.composite
def raw_episodes(draw: st.DrawFn) -> list[Raw]:
    numbers = st.floats(-10, 10)
    behaviour, target = st.floats(0.1, 1), st.floats(0.05, 1)

    def episode(size: int) -> st.SearchStrategy[Raw]:
        def many(one: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
            return st.lists(one, min_size=size, max_size=size)

        return st.tuples(many(numbers), many(behaviour), many(target), many(numbers), many(numbers))

    return draw(st.lists(st.integers(1, 6).flatmap(episode), min_size=1, max_size=7))


def plain(name: str, raw: list[Raw], gamma: float) -> float:
    """The same estimators, one episode and one step at a time, as in the papers."""
    n, longest = len(raw), max(len(one[0]) for one in raw)
    weights: list[list[float]] = [np.cumprod(np.divide(one[2], one[1])).tolist() for one in raw]
    returns = [sum(gamma**t * r for t, r in enumerate(one[0])) for one in raw]
    if name == "is":
        return sum(w[-1] * g for w, g in zip(weights, returns, strict=True)) / n
    if name == "wis":
        total = sum(w[-1] for w in weights)
        return sum(w[-1] * g for w, g in zip(weights, returns, strict=True)) / total
    if name == "pdis":
        pairs = zip(weights, raw, strict=True)
        return sum(gamma**t * w[t] * r for w, one in pairs for t, r in enumerate(one[0])) / n
    if name == "cwpdis":
        value = 0.0
        for t in range(longest):
            at = [w[min(t, len(w) - 1)] for w in weights]
            rewards = [one[0][t] if t < len(one[0]) else 0.0 for one in raw]
            value += gamma**t * float(np.dot(at, rewards)) / sum(at)
        return value
    if name == "dm":
        return sum(one[4][0] for one in raw) / n
    if name == "v_behavior":
        return sum(returns) / n
    total = 0.0
    for rewards, behaviour, target, q, v in raw:
        later = 0.0
        for t in reversed(range(len(rewards))):
            later = v[t] + target[t] / behaviour[t] * (rewards[t] + gamma * later - q[t])
        total += later
    return total / n


@settings(max_examples=60, deadline=None)
@given(raw=raw_episodes(), gamma=st.sampled_from([0.0, 0.5, 0.97, 1.0]))
def test_vectorised_estimators_equal_their_plain_loops(raw: list[Raw], gamma: float) -> None:
    """For all lengths, the flat arithmetic equals the definition (DR: the backward recursion)."""
    episodes = from_raw(raw)
    for name in SEQUENTIAL:
        value = ESTIMATORS[name](episodes, gamma=gamma).value
        expected = plain(name, raw, gamma)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-6), name


def test_many_lengths_fall_into_several_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights do not depend on the grouping of episodes into tables."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 90, 60)
    rows = int(lengths.sum())
    episodes = Episodes.from_flat(
        rng.normal(size=rows),
        lengths=lengths,
        behaviour_logp=np.log(rng.uniform(0.5, 1, rows)),
        target_logp=np.log(rng.uniform(0.5, 1, rows)),
    )
    at_once = estimators.pdis(episodes, gamma=0.9)
    monkeypatch.setattr("policy.ope.episodes.CELLS", 100)
    assert estimators.pdis(episodes, gamma=0.9) == at_once


# ------------------------------------------------------------------ laws


@settings(max_examples=40, deadline=None)
@given(raw=raw_episodes(), seed=st.integers(0, 99))
def test_the_order_of_episodes_does_not_matter(raw: list[Raw], seed: int) -> None:
    """An estimate is a function of the set of episodes."""
    shuffled = [raw[i] for i in np.random.default_rng(seed).permutation(len(raw))]
    for name in SEQUENTIAL:
        one = ESTIMATORS[name](from_raw(raw), gamma=0.9)
        other = ESTIMATORS[name](from_raw(shuffled), gamma=0.9)
        assert other.value == pytest.approx(one.value, rel=1e-9, abs=1e-6), name
        assert other.stderr == pytest.approx(one.stderr, rel=1e-6, abs=1e-6), name
        assert other.ess == pytest.approx(one.ess, rel=1e-9), name


@settings(max_examples=40, deadline=None)
@given(raw=raw_episodes())
def test_the_logging_policy_is_worth_its_mean_return(raw: list[Raw]) -> None:
    """Target = behaviour: all weights are 1 and every weighted estimate is the mean return."""
    same = from_raw([(r, b, b, q, v) for r, b, _, q, v in raw])
    mean = estimators.v_behavior(same, gamma=0.9)
    for name in ("is", "pdis", "wis"):
        estimate = ESTIMATORS[name](same, gamma=0.9)
        assert estimate.value == pytest.approx(mean.value, rel=1e-9, abs=1e-9), name
        assert estimate.stderr == pytest.approx(mean.stderr, rel=1e-6, abs=1e-9), name
        assert estimate.ess == pytest.approx(len(raw)), name
        assert estimate.max_weight == pytest.approx(1.0), name
    # An ended episode earns 0 at the later steps: cwpdis agrees as well.
    assert estimators.cwpdis(same, gamma=0.9).value == pytest.approx(mean.value, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(raw=raw_episodes())
def test_wis_stays_among_the_returns(raw: list[Raw]) -> None:
    """A weighted average lies between the lowest and the highest return."""
    returns = [sum(0.9**t * r for t, r in enumerate(one[0])) for one in raw]
    value = estimators.wis(from_raw(raw), gamma=0.9).value
    assert min(returns) - 1e-9 <= value <= max(returns) + 1e-9


@settings(max_examples=40, deadline=None)
@given(raw=raw_episodes(), seed=st.integers(0, 99))
def test_dr_with_an_exact_model_has_no_error_left(raw: list[Raw], seed: int) -> None:
    """q_t = r_t + g v_{t+1}: the residuals cancel and dr is the mean of v_0, whatever the w."""
    exact: list[Raw] = []
    for rewards, behaviour, target, _, v in raw:
        q = [r + 0.9 * after for r, after in zip(rewards, [*v[1:], 0.0], strict=True)]
        exact.append((rewards, behaviour, target, q, v))
    estimate, model = (ESTIMATORS[name](from_raw(exact), gamma=0.9) for name in ("dr", "dm"))
    scale = max(1.0, estimate.max_weight)
    assert estimate.value == pytest.approx(model.value, rel=1e-9, abs=1e-9 * scale)


def test_dr_without_a_model_is_pdis() -> None:
    """q = v = 0 leaves the per-decision terms."""
    raw = [(r, b, t, [0.0] * len(r), [0.0] * len(r)) for r, b, t, _, _ in RAGGED]
    for gamma in (0.3, 1.0):
        bare = estimators.dr(from_raw(raw), gamma=gamma)
        assert bare.value == pytest.approx(estimators.pdis(from_raw(raw), gamma=gamma).value)


def test_switch_and_shrinkage_reach_from_the_model_to_dr() -> None:
    """tau and shrinkage: 0 is the model alone, infinity is plain DR."""
    episodes = from_raw(BANDIT)
    model, doubly = estimators.dm(episodes).value, estimators.dr(episodes).value
    assert model != pytest.approx(doubly, rel=1e-3)
    assert estimators.switch_dr(episodes, tau=0).value == pytest.approx(model)
    assert estimators.switch_dr(episodes, tau=np.inf).value == pytest.approx(doubly)
    assert estimators.dr_os(episodes, shrinkage=0).value == pytest.approx(model)
    assert estimators.dr_os(episodes, shrinkage=np.inf).value == pytest.approx(doubly)


def test_effective_sample_size_counts_what_carries_weight() -> None:
    """An episode with all the weight counts as one; equal weights count as all episodes."""
    rewards, half = np.ones(10), np.full(10, 0.5)
    lone = Episodes.one_step(rewards, behaviour_prob=half, target_prob=np.eye(10)[3])
    assert estimators.ips(lone).ess == pytest.approx(1.0)
    assert estimators.ips(lone).max_weight == pytest.approx(2.0)
    equal = Episodes.one_step(rewards, behaviour_prob=half, target_prob=np.full(10, 0.1))
    assert estimators.ips(equal).ess == pytest.approx(10.0)


# ------------------------------------------------------------------ what is left out


def test_episodes_without_propensities_are_left_out_and_counted() -> None:
    """One unknown logp excludes its whole episode, and no other number changes."""
    episodes = from_raw(RAGGED)
    behaviour = episodes.behaviour_logp.copy()
    behaviour[4] = np.nan  # the second step of the second episode
    gap = Episodes.from_flat(
        episodes.rewards,
        lengths=episodes.lengths,
        behaviour_logp=behaviour,
        target_logp=episodes.target_logp,
        q=episodes.q,
        v=episodes.v,
        excluded={"empty": 3},
    )
    rest = from_raw([RAGGED[0], RAGGED[2], RAGGED[3]])
    for name in ("is", "pdis", "wis", "cwpdis", "dr"):
        estimate = ESTIMATORS[name](gap, gamma=0.9)
        assert estimate.value == ESTIMATORS[name](rest, gamma=0.9).value, name
        assert estimate.n == 3
        assert estimate.excluded == {"empty": 3, "no_propensity": 1}
    # Estimators without propensities use all episodes, unless asked to use the same ones.
    assert estimators.v_behavior(gap).n == estimators.dm(gap).n == 4
    assert estimators.v_behavior(gap.with_propensity()).excluded["no_propensity"] == 1


@pytest.mark.parametrize("name", ONE_STEP)
def test_bandit_estimators_leave_out_unknown_propensities_too(name: str) -> None:
    """A nan among the propensities excludes one episode, and does not give a nan."""
    columns: dict[str, Any] = {
        "target_prob": [0.3, 0.4, 0.5], "q": [0.1, 0.2, 0.3], "v": [0.4, 0.5, 0.6]
    }  # fmt: skip
    gap = Episodes.one_step([1.0, 2.0, 4.0], behaviour_prob=[0.5, np.nan, 0.2], **columns)
    both: dict[str, Any] = {key: [one[0], one[2]] for key, one in columns.items()}
    rest = Episodes.one_step([1.0, 4.0], behaviour_prob=[0.5, 0.2], **both)
    assert ESTIMATORS[name](gap).value == ESTIMATORS[name](rest).value
    assert ESTIMATORS[name](gap).excluded == {"no_propensity": 1}


def test_counts_of_one_reason_add_up() -> None:
    """Episodes left out by the caller and here are one number."""
    episodes = from_raw(RAGGED, ended=["broken"] * 2 + ["terminated"] * 2, excluded={"broken": 5})
    assert episodes.excluded == {"broken": 7}


def test_episodes_that_are_not_whole_are_left_out_and_counted() -> None:
    """abandoned, broken and unfinished episodes are left out by default; truncated ones stay."""
    ended = ["truncated", "abandoned", None, "broken"]
    kept = from_raw(RAGGED, ended=ended)
    assert kept.excluded == {"abandoned": 1, "broken": 1, "unfinished": 1}
    assert estimators.pdis(kept).value == estimators.pdis(from_raw(RAGGED[:1])).value
    assert from_raw(RAGGED, ended=np.array(ended, dtype=object), leave_out=()).n == 4
    nan_for_none = np.array(["truncated", np.nan, "terminated", "terminated"], dtype=object)
    assert from_raw(RAGGED, ended=nan_for_none).excluded == {"unfinished": 1}


def test_when_nothing_is_left_the_error_says_what_to_do() -> None:
    """No propensity anywhere: the message counts, and names the argument to log with."""
    blind = Episodes.from_flat([1.0, 2.0], lengths=[1, 1], target_logp=[-1.0, -1.0])
    with pytest.raises(ValueError, match=r"no_propensity: 2.*action_prob="):
        estimators.ips(blind)
    lost = Episodes.from_flat([1.0], lengths=[1], ended=["abandoned"])
    with pytest.raises(ValueError, match=r"abandoned: 1.*end_episode"):
        estimators.v_behavior(lost)
    with pytest.raises(ValueError, match="none were given"):
        estimators.v_behavior(Episodes.from_flat([], lengths=[]))


# ------------------------------------------------------------------ refusals


def test_estimators_say_what_they_miss() -> None:
    """A missing column, long episodes for a bandit estimator, an invalid setting: all named."""
    bare = Episodes.from_flat([1.0, 2.0], lengths=[2], behaviour_logp=[-1.0, -1.0])
    with pytest.raises(ValueError, match="needs v"):
        estimators.dm(bare)
    with pytest.raises(ValueError, match="needs target_logp, q, v"):
        estimators.dr(bare)
    for name in ONE_STEP:
        with pytest.raises(ValueError, match=f"{name}: expected one-step episodes, got one of 2"):
            ESTIMATORS[name](bare)
    with pytest.raises(ValueError, match=r"gamma.*1\.5"):
        estimators.v_behavior(bare, gamma=1.5)
    with pytest.raises(ValueError, match="tau"):
        estimators.switch_dr(from_raw(BANDIT), tau=-1)
    with pytest.raises(ValueError, match="shrinkage"):
        estimators.dr_os(from_raw(BANDIT), shrinkage=math.nan)


def test_no_overlap_is_an_error_not_a_zero() -> None:
    """If the target never takes a logged action, 0 +- 0 would look like a certain result."""
    none = Episodes.one_step([1.0, 1.0], behaviour_prob=[0.5, 0.5], target_prob=[0.0, 0.0])
    for name in ("ips", "snips", "pdis", "cwpdis"):
        with pytest.raises(ValueError, match="every importance weight is 0"):
            ESTIMATORS[name](none)
    later = from_raw([([1.0, 1.0], [0.5, 0.5], [0.5, 0.0], [0.0] * 2, [0.0] * 2)] * 2)
    assert estimators.pdis(later).value == 1.0
    assert estimators.pdis(later).ess == 0.0
    with pytest.raises(ValueError, match="0 at step 1"):
        estimators.cwpdis(later)
    with pytest.raises(ValueError, match="every importance weight is 0"):
        estimators.wis(later)


def test_a_weight_beyond_reason_is_refused() -> None:
    """Products that leave the range of float64 name the episode instead of giving nan."""
    columns: dict[str, Any] = {"lengths": [1, 2], "behaviour_logp": [-1.0, -700.0, -700.0]}
    far = Episodes.from_flat([1.0] * 3, target_logp=[-1.0, 0.0, 0.0], **columns)
    with pytest.raises(ValueError, match="weight of episode 1 exceeds"):
        estimators.pdis(far)


def test_a_zero_probability_stays_in_its_episode() -> None:
    """-inf in one episode does not change the weights of its neighbours."""
    raw = [
        ([1.0, 1.0], [0.5, 0.5], [0.0, 0.5], [0.0] * 2, [0.0] * 2),
        ([1.0, 1.0], [0.5, 0.5], [0.5, 1.0], [0.0] * 2, [0.0] * 2),
    ]
    assert estimators.pdis(from_raw(raw)).value == pytest.approx((0 + 1 + 2) / 2)


# ------------------------------------------------------------------ the face


def test_an_estimate_is_strict_json() -> None:
    """to_dict has plain types only, with null for non-finite values."""
    estimate = estimators.pdis(from_raw(RAGGED[:1], excluded={"empty": 2}))
    text = json.loads(json.dumps(estimate.to_dict(), allow_nan=False))
    assert text["stderr"] is None
    assert text["interval"] == [None, None]
    assert (text["name"], text["n"], text["excluded"]) == ("pdis", 1, {"empty": 2})
    assert set(text) == set(Estimate.__dataclass_fields__)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_registry_names_what_it_returns(name: str) -> None:
    """An estimator found by name returns that name and takes the common arguments."""
    episodes = from_raw(BANDIT)
    estimate = ESTIMATORS[name](episodes, gamma=0.9, interval=StudentT(0.8))
    assert (estimate.name, estimate.level, estimate.n) == (name, 0.8, 4)
    assert estimate.interval[0] <= estimate.value <= estimate.interval[1]


def test_public_names_exist() -> None:
    """__all__ matches the module's contents."""
    assert all(hasattr(estimators, name) for name in estimators.__all__)
