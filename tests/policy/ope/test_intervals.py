"""Standard errors and intervals: textbook forms, the jackknife, and coverage of known values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policy.ope import estimators
from policy.ope.episodes import Episodes
from policy.ope.estimators import ESTIMATORS
from policy.ope.intervals import Bootstrap, PerStepSums, StudentT, Sums

ONE_STEP = ("ips", "snips", "sndr", "switch_dr", "dr_os")


def one_step(n: int = 400, seed: int = 0) -> Episodes:
    """Two actions, logged half and half, judged for a policy that takes action 1 at 0.8."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, 2, n)
    q = np.where(actions == 1, 0.65, 0.35)
    return Episodes.one_step(
        rng.binomial(1, np.where(actions == 1, 0.7, 0.3)),
        behaviour_prob=np.full(n, 0.5),
        target_prob=np.where(actions == 1, 0.8, 0.2),
        q=q,
        v=np.full(n, 0.8 * 0.65 + 0.2 * 0.35),
    )


def three_steps(n: int, seed: int) -> Episodes:
    """Episodes of 1 to 3 steps: each ends early with probability 0.2, r ~ N(action, 1)."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(0.2, n), 3)
    actions = rng.integers(0, 2, int(lengths.sum()))
    return Episodes.from_flat(
        rng.normal(actions, 1.0),
        lengths=lengths,
        behaviour_logp=np.full(actions.size, np.log(0.5)),
        target_logp=np.log(np.where(actions == 1, 0.7, 0.3)),
        q=actions.astype(float),
        v=np.full(actions.size, 0.7),
    )


# 0.7 a step over 1 + 0.8 + 0.64 expected steps
THREE_STEPS_VALUE = 0.7 * (1 + 0.8 + 0.64)


def test_stderr_of_snips_is_the_textbook_one() -> None:
    """Owen, section 9.2: sqrt(sum w^2 (r - mu)^2) / sum w, times sqrt(n / (n - 1))."""
    episodes = one_step()
    estimate = estimators.snips(episodes)
    assert episodes.target_logp is not None
    w = np.exp(episodes.target_logp - episodes.behaviour_logp)
    textbook = np.sqrt(np.sum(w**2 * (episodes.rewards - estimate.value) ** 2)) / w.sum()
    assert estimate.stderr == pytest.approx(textbook * np.sqrt(400 / 399), rel=1e-12)


@pytest.mark.parametrize("name", ["is", "pdis", "wis", "cwpdis", "dr", "v_behavior"])
def test_stderr_agrees_with_the_jackknife(name: str) -> None:
    """Leaving out one episode at a time gives the same standard error without any calculus."""
    episodes, n = three_steps(300, seed=1), 300
    everyone = np.arange(n)
    values = np.array(
        [
            ESTIMATORS[name](episodes.without(everyone == i, "jackknife"), gamma=0.9).value
            for i in range(n)
        ]
    )
    jackknife = np.sqrt((n - 1) / n * np.sum((values - np.mean(values)) ** 2))
    assert ESTIMATORS[name](episodes, gamma=0.9).stderr == pytest.approx(jackknife, rel=0.02)


def test_influence_is_the_derivative_of_the_estimate() -> None:
    """Counting an episode a little more moves the estimate by its influence / n."""
    data = three_steps(12, seed=4)
    assert data.target_logp is not None
    weights = np.exp(data.target_logp - data.behaviour_logp)
    first = weights[data.starts]
    for sums in (
        PerStepSums(weights, data.rewards, data.lengths, 0.9),
        Sums(numerator=first * data.rewards[data.starts], denominator=first),
    ):
        more, less = (np.ones((12, 12)) + sign * 1e-5 * np.eye(12) for sign in (1, -1))
        slopes = (sums.value(more) - sums.value(less)) / 2e-5
        np.testing.assert_allclose(sums.influence(), 12 * slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"dm"}))
def test_bootstrap_and_student_t_agree_when_there_is_much_data(name: str) -> None:
    """Two methods, one interval: their ends are within a fifth of the width of each other."""
    episodes = one_step() if name in ONE_STEP else three_steps(400, seed=2)
    theory = ESTIMATORS[name](episodes, gamma=0.9, interval=StudentT(0.9))
    drawn = ESTIMATORS[name](
        episodes, gamma=0.9, interval=Bootstrap(np.random.default_rng(5), level=0.9)
    )
    width = theory.interval[1] - theory.interval[0]
    assert drawn.interval == pytest.approx(theory.interval, abs=width / 5)
    assert width == pytest.approx(2 * 1.6487 * theory.stderr, rel=1e-3)  # t(399) at 95 %
    assert (drawn.value, drawn.stderr) == (theory.value, theory.stderr)
    assert drawn.level == theory.level == 0.9


def test_bootstrap_repeats_with_its_seed_in_any_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same Generator gives the same interval, however few resamples fit into memory."""

    def interval() -> tuple[float, float]:
        rng = np.random.default_rng(11)
        return estimators.wis(three_steps(50, seed=0), interval=Bootstrap(rng)).interval

    first = interval()
    assert interval() == first
    monkeypatch.setattr("policy.ope.intervals.CELLS", 120)
    assert interval() == pytest.approx(first, rel=1e-12)


def test_bootstrap_of_a_mean_has_the_percentiles_of_resampled_means() -> None:
    """Checked against resampling rows by hand, with other random numbers."""
    returns = np.random.default_rng(0).exponential(size=80)
    episodes = Episodes.from_flat(returns, lengths=np.ones(80, dtype=int))
    bootstrap = Bootstrap(np.random.default_rng(1), level=0.8, resamples=20_000)
    by_hand = np.random.default_rng(2).choice(returns, (20_000, 80)).mean(axis=1)
    expected = np.quantile(by_hand, [0.1, 0.9])
    assert estimators.v_behavior(episodes, interval=bootstrap).interval == pytest.approx(
        expected, abs=0.01
    )


def test_a_resample_without_weight_widens_the_interval() -> None:
    """With one weighted episode in 20, a third of the resamples have no ratio: there is no valid
    limit.
    """
    target = np.where(np.arange(20) == 0, 0.5, 0.0)
    lone = Episodes.one_step(np.ones(20), behaviour_prob=np.full(20, 0.5), target_prob=target)
    estimate = estimators.snips(lone, interval=Bootstrap(np.random.default_rng(0)))
    assert estimate.interval == (-math.inf, math.inf)
    assert estimate.to_dict()["interval"] == [None, None]


COVERAGE = {
    "ips": 0.62, "snips": 0.62, "dr": 0.62, "sndr": 0.62,
    "is": THREE_STEPS_VALUE, "pdis": THREE_STEPS_VALUE, "wis": THREE_STEPS_VALUE,
    "cwpdis": THREE_STEPS_VALUE,
}  # fmt: skip


@pytest.mark.parametrize("name", COVERAGE)
def test_nineteen_of_twenty_intervals_hold_the_truth(name: str) -> None:
    """400 logs of known value: coverage of the 95 % interval is within 3.3 sigma of 95 %."""
    hits = 0
    for seed in range(400):
        bandit = name in ONE_STEP or name == "dr"
        episodes = one_step(300, 1000 + seed) if bandit else three_steps(400, 1000 + seed)
        low, high = ESTIMATORS[name](episodes).interval
        hits += low <= COVERAGE[name] <= high
    assert 400 * 0.914 <= hits <= 400 * 0.986


def test_bootstrap_intervals_hold_the_truth() -> None:
    """200 logs, 300 resamples each; percentile intervals may be a little short."""
    hits = 0
    for seed in range(200):
        bootstrap = Bootstrap(np.random.default_rng(seed), resamples=300)
        low, high = estimators.snips(one_step(200, 5000 + seed), interval=bootstrap).interval
        hits += low <= 0.62 <= high
    assert 200 * 0.89 <= hits <= 200 * 0.99


def test_one_episode_has_no_finite_interval() -> None:
    """A single return says nothing about its spread."""
    alone = Episodes.from_flat([1.0, 2.0], lengths=[2])
    for interval in (StudentT(), Bootstrap(np.random.default_rng(0))):
        estimate = estimators.v_behavior(alone, interval=interval)
        assert estimate.value == 3.0
        assert estimate.stderr == math.inf
        assert estimate.interval == (-math.inf, math.inf)


def test_silly_settings_are_refused() -> None:
    """A level is a share, not a percentage; a bootstrap draws at least once."""
    with pytest.raises(ValueError, match="level"):
        StudentT(95)
    with pytest.raises(ValueError, match="resamples"):
        Bootstrap(np.random.default_rng(0), resamples=0)
