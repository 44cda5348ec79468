"""The judgement: the parts of a verdict, and how often it is wrong (`make judge`)."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from policy.ope.columns import combined as combined_columns
from policy.ope.comparison import compare
from policy.ope.differences import Differences
from policy.ope.judgement import Bar, Judged, Judgement, Rules, TargetPolicy, combined, judge
from tests.judge.cases import equal_or_worse, power, users
from tests.judge.tally import Tally, tallied, too_often_refused

REPETITIONS = 100
SHORT = (
    "binary .5 equal, 1,000, log",
    "binary .5 equal, 1,000, rival",
    "Gaussian equal, 1,000, log",
    "failures 0.002 equal, 1,000, log",
    "failures 0.002 equal, 1,000, rival",
    "failures 0.03 equal, 1,000, log",
    "failures .03 worse, 3,000, rival",
    "Pareto 1.5 costs equal, 10,000, log",
    "users of 20 equal, 10,000",
    "10 steps equal, 1,000",
    "binary .5 +40 %, 1,000, log",
    "binary .5 +10 %, 3,000, log",
    "binary .5 -40 %, 1,000, log",
)
CASES = {case.name: case for case in (*equal_or_worse(), *power())}


@pytest.mark.parametrize("name", SHORT)
def test_the_judge_is_wrong_no_more_often_than_it_says(name: str) -> None:
    """False calls, coverage, power and refusals of sound logs stay within their targets."""
    for tally in tallied(CASES[name], REPETITIONS, seed=7):
        assert list(tally.failures()) == [], tally.bound


def test_a_user_is_the_unit_or_the_calls_are_wrong() -> None:
    """If the 20 episodes of a user count as 20 samples, there are too many false calls."""
    (tally,) = tallied(users("by episode", 10_000, 20, known=False), 100, 7, only=["student"])
    assert any("false better" in one for one in tally.failures())


def coarse_root(surplus, least, mean):
    """The planted build: the first of twenty numbers over the range that is not refuted."""
    grid = np.linspace(least, -least, 20)
    kept = [one for one in grid[1:-1] if surplus(one) <= 0]
    return float(kept[0]) if kept else mean


def test_a_bound_by_a_coarse_grid_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step is wider than the difference, so it calls most logs better."""
    monkeypatch.setattr("policy.ope.betting._root", coarse_root)
    (tally,) = tallied(CASES["binary .5 equal, 1,000, log"], 50, seed=7, only=["betting"])
    assert tally.share("better") > 0.5
    assert any("false better" in one for one in tally.failures())


def test_a_bound_that_looks_ahead_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bets that know the current number are detected by their false calls."""

    def peeking(values, least, error, sequence):
        return combined_columns(lambda block: np.where(block > 0, 0.05, 0.0), values)

    monkeypatch.setattr("policy.ope.betting._bets", peeking)
    (tally,) = tallied(CASES["binary .5 equal, 1,000, log"], 50, seed=7, only=["betting"])
    assert list(tally.failures()) != []


def test_a_tally_excludes_a_target_by_a_binomial_bound() -> None:
    """At 2,000 repetitions, 2.5 % may be 73 false calls, but not 80."""
    case = CASES["binary .5 equal, 1,000, log"]
    for calls, failed in ((50, 0), (73, 0), (80, 1)):
        tally = Tally(case, "betting", 2000, {"better": calls}, covered=1950, compared=2000)
        assert len(list(tally.failures())) == failed
    assert list(Tally(case, "betting", 2000, {}, covered=1850, compared=2000).failures())
    assert list(Tally(case, "betting", 2000, {}, 2000, 2000, refused=12).failures())
    assert not list(Tally(case, "betting", 2000, {}, 2000, 2000, refused=6).failures())
    assert too_often_refused(60, 30_000), "by all cases together less is too much"
    assert not too_often_refused(40, 30_000)


# --- one judgement -----------------------------------------------------------------------------


def bandit(n: int = 4000, seed: int = 0) -> tuple[Judged, TargetPolicy, TargetPolicy]:
    """(log, first, other): two actions, logged evenly, that earn 0.8 and 0.2.

    `first` and `other` are policies that take the first and the second action nine times in ten.
    """
    rng = np.random.default_rng(seed)
    taken = rng.integers(2, size=n)
    data = Judged(
        rewards=(rng.random(n) < np.where(taken == 0, 0.8, 0.2)).astype(np.float64),
        lengths=np.ones(n, np.int64),
        behaviour_logp=np.full(n, np.log(0.5)),
        flat=rng.normal(size=(n, 2)),
        taken=taken,
    )

    def taking(p: float) -> TargetPolicy:
        probs = np.array([p, 1 - p])
        return TargetPolicy(np.log(probs[taken]), np.broadcast_to(probs, (n, 2)))

    return data, taking(0.9), taking(0.1)


@pytest.mark.parametrize("limits", [None, (0.0, 1.0)])
def test_better_is_better_than_every_bar(limits: tuple[float, float] | None) -> None:
    """A candidate is worse if worse than one bar, and undecided if undecided on one."""
    data, good, bad = bandit()
    rules, logging = Rules(reward_range=limits), Bar("the logging policy")
    assert judge(data, good, [Bar("live", bad), logging], rules).verdict == "better"
    found = judge(data, bad, [Bar("live", good), logging], rules)
    assert (found.verdict, len(found.reasons)) == ("worse", 2)
    names = [one.name for one in found.diagnostics]
    assert len(names) == len({*names})  # each check of the live version has its own name
    same = judge(data, good, [Bar("live", good), logging], rules)
    assert [one.verdict for one in same.comparisons] == ["cannot tell", "better"]
    assert same.verdict == "cannot tell"
    assert same.comparisons[0].difference == 0
    json.dumps(same.to_dict(), allow_nan=False)


def test_a_live_version_that_made_the_log_is_one_bar() -> None:
    """The logging policy is no second bar, and the standard error is smaller."""
    data, good, _ = bandit()
    probs = np.broadcast_to(np.full(2, 0.5), (4000, 2))
    live = Bar("live", TargetPolicy(np.full(4000, np.log(0.5) + 1e-6), probs))
    found = judge(data, good, [live, Bar("the logging policy")], Rules(reward_range=(0.0, 1.0)))
    assert [one.bar for one in found.comparisons] == ["live"]
    alone = judge(data, good, [Bar("the logging policy")], Rules(reward_range=(0.0, 1.0)))
    assert found.comparisons[0].stderr < 0.8 * alone.comparisons[0].stderr
    assert not any(one.name.startswith("live_") for one in found.diagnostics)


def needing(n: int, limits: tuple[float, float] | None, gain: float, *, live: bool) -> Judgement:
    """The live version takes the rarer of two actions; the other one earns `gain` tenths more."""
    number = np.arange(n)
    taken = (number % 3 == 0).astype(np.int64)
    data = Judged(
        rewards=(number // 3 % 10 < np.where(taken == 0, 5 + gain, 5)).astype(np.float64),
        lengths=np.ones(n, np.int64),
        behaviour_logp=np.log(np.where(taken == 0, 2 / 3, 1 / 3)),
        flat=np.zeros((n, 1)),
        taken=taken,
    )

    def taking(p: float) -> TargetPolicy:
        probs = np.array([p, 1 - p])
        return TargetPolicy(np.log(probs[taken]), np.broadcast_to(probs, (n, 2)))

    bars = [Bar("live version 1", taking(0.2))] if live else []
    rules = Rules(reward_range=limits, unit="held-out episodes")
    return judge(data, taking(0.9), [*bars, Bar("the logging policy")], rules)


def test_the_number_of_further_episodes_is_the_largest_of_all() -> None:
    """The numbers are of the effective sample sizes and of each difference.

    The last reason names the largest.
    """
    found = needing(120, (0.0, 1.0), 1, live=True)
    short = [one.missing for one in found.diagnostics if not one.passed]
    apart = [one.missing for one in found.comparisons]
    assert [one.verdict for one in found.comparisons] == ["cannot tell"] * 2
    assert all(isinstance(one, int) for one in (*short, *apart))
    assert found.missing == max(*short, *apart) > max(short)  # type: ignore[type-var]
    assert found.reasons[-1] == (
        f"in all about {found.missing:,} more held-out episodes: the largest of these numbers"
    )
    assert sum("would show whether it is real" in one for one in found.reasons) == 2
    assert found.to_dict()["missing"] == found.missing


def test_no_number_is_invented_while_the_spread_is_unknown() -> None:
    """With few effective episodes or a failed check, the reason says why none is known."""
    few = needing(30, (0.0, 1.0), 1, live=False)
    (short,) = (one for one in few.diagnostics if one.name == "effective_sample_size")
    assert (short.value < 30, few.verdict, few.missing) == (True, "cannot tell", None)
    assert few.reasons[-1] == (
        f"in all at least {short.missing:,} more held-out episodes: how many the difference to the "
        "logging policy needs is not known before these checks pass; or use a canary"
    )
    rare = needing(60, None, 1, live=False)  # fewer than 30 reward events
    assert "not known before these checks pass" in rare.reasons[-1]
    assert rare.missing is None


def test_a_difference_that_is_shown_needs_no_more() -> None:
    """If only the effective sample size is too small, its number is the answer."""
    data, good, _ = bandit()
    rules = Rules(reward_range=(0.0, 1.0), min_ess=1e5)
    found = judge(data, good, [Bar("the logging policy")], rules)
    (reason,) = found.reasons
    (short,) = (one for one in found.diagnostics if not one.passed)
    assert short.name == "effective_sample_size"
    assert found.comparisons[0].verdict == "better"
    assert (found.verdict, found.missing) == ("cannot tell", short.missing)
    assert f"about {short.missing:,} more episodes" in reason


def test_without_a_difference_there_is_no_number() -> None:
    """If the candidate is the live version, the reason says that no difference is seen."""
    data, good, _ = bandit()
    found = judge(data, good, [Bar("live", good), Bar("the logging policy")], Rules())
    assert found.missing is None
    assert found.reasons[0].endswith("is not known, because no difference is to be seen")


def explored(lowest: float, n: int = 1500) -> tuple[Judged, TargetPolicy]:
    """Two actions: the worse one is rare in the log, and half as likely by the candidate."""
    rng = np.random.default_rng(1)
    rare = rng.random(n) < lowest
    data = Judged(
        rewards=(rng.random(n) < np.where(rare, 0.2, 0.3)).astype(np.float64),
        lengths=np.ones(n, np.int64),
        behaviour_logp=np.log(np.where(rare, lowest, 1 - lowest)),
        flat=np.ones((n, 1)),
        taken=rare.astype(np.int64),
    )
    probs = np.array([1 - lowest / 2, lowest / 2])
    return data, TargetPolicy(np.log(probs[data.taken]), np.broadcast_to(probs, (n, 2)))


def test_a_bound_that_is_wide_for_a_low_propensity_says_so() -> None:
    """A reason names the lowest propensity and its effect, but only where it is the cause."""
    rules = Rules(reward_range=(0.0, 1.0), min_ess=1.0)
    data, candidate = explored(0.0074)
    found = judge(data, candidate, [Bar("the logging policy")], rules)
    assert found.verdict == "cannot tell"
    apart, why = found.reasons
    assert apart.startswith("the difference to the logging policy is ")
    assert apart.endswith(" more episodes would show whether it is real")
    assert "lowest logged propensity is 0.0074" in why
    assert "without a range" in why
    assert "one step with it may count for 135" in why
    for limits, lowest in ((None, 0.0074), ((0.0, 1.0), 0.4)):
        data, candidate = explored(lowest)
        rules = Rules(reward_range=limits, min_ess=1.0)
        found = judge(data, candidate, [Bar("the logging policy")], rules)
        assert not [one for one in found.reasons if "propensity" in one], found.reasons


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("shortest", [12, 5])
@pytest.mark.parametrize("range_", [(-1.3, 0.3), (1.0, 2.0)])
def test_no_interval_is_wider_than_the_reward_range_allows(
    shortest: int, range_: tuple[float, float], gamma: float
) -> None:
    """Twelve steps with weights of up to 20 each: no policy earns more than the highest reward at
    each, or less than the lowest. The canary is the way out."""
    rng, n = np.random.default_rng(12), 200
    lengths = rng.integers(shortest, 12, size=n, endpoint=True)
    lengths[0] = 12
    steps = int(lengths.sum())
    taken = np.where(rng.random(steps) < 0.05, 0, 1)
    data = Judged(
        rewards=rng.uniform(*range_, size=steps),
        lengths=lengths,
        behaviour_logp=np.log(np.where(taken == 0, 0.05, 0.95)),
        flat=np.zeros((steps, 1)),
        taken=taken,
    )
    probs = np.broadcast_to([0.5, 0.5], (steps, 2))
    candidate = TargetPolicy(np.full(steps, np.log(0.5)), probs)
    live = TargetPolicy(np.full(steps, np.log(0.3)), np.broadcast_to([0.3, 0.7], (steps, 2)))
    rules = Rules(reward_range=range_, min_ess=1.0, gamma=gamma)
    found = judge(data, candidate, [Bar("live", live)], rules)
    (one,) = found.comparisons
    low, high = range_ if shortest == 12 else (min(range_[0], 0.0), max(range_[1], 0.0))
    furthest = (high - low) * sum(gamma**t for t in range(12))
    assert one.interval == pytest.approx((-furthest, furthest))
    assert (one.verdict, one.missing) == ("cannot tell", None)


@pytest.mark.parametrize("pass_prob", [1.0, 0.5])
@pytest.mark.parametrize("method", ["dr", "ips"])
def test_the_range_limits_the_interval_of_one_step(method: str, pass_prob: float) -> None:
    """Two policies differ by at most the width of the range, with a reward model or without. If
    episodes are logged with different probabilities, the limit is larger by the largest 1 / p over
    the mean, which the log only estimates."""
    n = 20
    number = np.arange(n)
    taken = (number % 10 > 0).astype(np.int64)
    logged = np.where(number % 2 == 0, pass_prob, 1.0)
    data = Judged(
        rewards=np.where(number % 3 == 0, 0.5, -1.0),
        lengths=np.ones(n, np.int64),
        behaviour_logp=np.log(np.where(taken == 0, 0.02, 0.98)),
        flat=np.zeros((n, 1)),
        taken=taken,
        pass_prob=logged,
    )
    probs = np.broadcast_to([0.5, 0.5], (n, 2)) if method == "dr" else None
    candidate = TargetPolicy(np.full(n, np.log(0.5)), probs)
    rules = Rules(reward_range=(-1.0, 0.5), min_ess=1.0)
    (one,) = judge(data, candidate, [Bar("the logging policy")], rules).comparisons
    furthest = 1.5 / pass_prob / (1 / logged).mean()
    assert one.method == method
    assert one.interval == pytest.approx((-furthest, furthest))


def test_a_difference_outside_its_interval_says_so() -> None:
    """A number of episodes would suggest that the measured value can be real."""
    values = np.tile([10.0, -1.0, -1.0, 4.0], 5)
    log = Differences("dr", values, values, -50.0, values, 50.0, furthest=1.0)
    few = compare(log, bar="the logging policy", error=0.025)
    found = combined([few], [], "the interval is wide")
    assert found.missing is None
    apart, why = found.reasons
    assert apart == (
        "the difference to the logging policy is +3, outside its interval -1 .. 1: how many more "
        "episodes it needs is not known, because the reward range excludes this value"
    )
    assert why == "the interval is wide"


def test_an_action_without_rows_is_named_in_the_reasons() -> None:
    """The reason has the action's name, if actions have names."""
    data, _, _ = bandit()
    data = replace(data, names=("bed", "lamp", "sofa"))
    n = len(data.rewards)
    probs = np.broadcast_to([0.2, 0.2, 0.6], (n, 3))
    candidate = TargetPolicy(np.full(n, np.log(0.2)), probs)
    found = judge(data, candidate, [Bar("the logging policy")], Rules(reward_range=(0.0, 1.0)))
    text = f"taken by the candidate, but not in the {n:,} judged steps: 'sofa' (60.0% of steps)"
    assert found.verdict == "cannot tell"
    assert any(text in reason for reason in found.reasons)


def test_a_failed_check_is_never_worse() -> None:
    """A log with wrong propensities proves nothing, however bad the candidate looks."""
    data, good, bad = bandit()
    wrong = Judged(
        rewards=data.rewards,
        lengths=data.lengths,
        behaviour_logp=np.full(4000, np.log(0.9)),
        flat=data.flat,
        taken=data.taken,
    )
    for limits in (None, (0.0, 1.0)):
        found = judge(wrong, bad, [Bar("live", good)], Rules(reward_range=limits))
        assert found.verdict == "cannot tell"
        assert {one.name for one in found.diagnostics if not one.passed} >= {
            "mean_weight",
            "live_mean_weight",
        }
        of_live = [one.sentence for one in found.diagnostics if one.name.startswith("live_")]
        assert not any("candidate" in one for one in of_live)


def test_continuous_actions_are_judged_approximately() -> None:
    """A density has no lower limit, so the limit is a normal one even with a reward range."""
    rng, n = np.random.default_rng(1), 3000
    actions = rng.normal(size=n)
    data = Judged(
        rewards=np.clip(0.5 + 0.2 * actions, 0, 1),
        lengths=np.ones(n, np.int64),
        behaviour_logp=-0.5 * actions**2,
        flat=np.zeros((n, 1)),
        discrete=False,
    )
    shifted = TargetPolicy(-0.5 * (actions - 0.5) ** 2)
    found = judge(data, shifted, [Bar("the logging policy")], Rules(reward_range=(0.0, 1.0)))
    assert (found.verdict, found.approximate) == ("better", True)
    assert found.comparisons[0].difference == pytest.approx(0.1, abs=0.05)


def test_the_weight_of_a_long_episode_overflows_no_moment() -> None:
    """An episode whose 500 actions the candidate takes far more often than the log outweighs all
    others: that is a verdict, and no error of arithmetic."""
    n, steps = 100, 500
    behaviour = np.full(n * steps, np.log(0.25))
    target = np.full(n * steps, np.log(0.1))
    target[:steps] = np.log(0.9)
    data = Judged(
        rewards=np.ones(n * steps),
        lengths=np.full(n, steps),
        behaviour_logp=behaviour,
        flat=np.zeros((n * steps, 1)),
    )
    found = judge(data, TargetPolicy(target), [Bar("the logging policy")], Rules())
    assert found.verdict == "cannot tell"
    assert not {one.name: one.passed for one in found.diagnostics}["largest_weight"]
    assert np.isfinite(found.comparisons[0].stderr)


@pytest.mark.parametrize(
    ("rules", "text"),
    [({"confidence": 1.0}, "confidence"), ({"reward_range": (1.0, 1.0)}, "reward_range")],
)
def test_rules_that_do_not_fit_are_refused(rules: dict[str, object], text: str) -> None:
    """The error names the rule."""
    with pytest.raises(ValueError, match=text):
        Rules(**rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.4])
def test_checks_weigh_a_log_that_is_sampled_by_outcome(share: float, users: bool) -> None:
    """All rewards are logged and a tenth of the other episodes, so good actions come more often.

    That is no fault; a first action that is taken in 40 % and written with .25 is one.
    """
    rng, n = np.random.default_rng(3), 40_000
    taken = rng.choice(4, p=[share, *[(1 - share) / 3] * 3], size=n)
    rewards = (rng.random(n) < np.array([0.1, 0.02, 0.02, 0.02])[taken]).astype(np.float64)
    lost = (rewards == 0) & (rng.random(n) < 0.02)
    kept = (rewards == 1) | (rng.random(n) < 0.1)
    taken, count, probs = taken[kept], int(kept.sum()), np.array([0.7, 0.1, 0.1, 0.1])
    data = Judged(
        rewards=rewards[kept],
        lengths=np.ones(count, np.int64),
        behaviour_logp=np.full(count, np.log(0.25)),
        flat=rng.normal(size=(count, 1)),
        taken=taken,
        units=np.arange(count) if users else None,
        pass_prob=np.where(rewards[kept] == 1, 1.0, 0.1),
        lost=lost[kept],
    )
    candidate = TargetPolicy(np.log(probs[taken]), np.broadcast_to(probs, (count, 4)))
    found = judge(data, candidate, [Bar("log")], Rules())
    failed = {one.name for one in found.diagnostics if not one.passed}
    values = {one.name: one.value for one in found.diagnostics}
    if share == 0.25:
        assert (found.verdict, failed) == ("better", set())
        assert values["mean_weight"] == pytest.approx(1, abs=0.05)
    else:
        assert {"mean_weight", "propensities"} <= failed
        assert values["propensities"] == pytest.approx(1.6, abs=0.1)
        assert values["mean_weight"] == pytest.approx(4 * (0.4 * 0.7 + 0.6 * 0.1), abs=0.1)
