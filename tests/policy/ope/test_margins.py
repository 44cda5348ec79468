"""A margin is reward per episode or a share of the bar, and a verdict holds against both ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policy.ope.judgement import Bar, Judged, Rules, TargetPolicy, judge
from policy.ope.margins import Margin

FIRST = np.array([0.97, 0.01, 0.01, 0.01])


def test_a_margin_is_a_number_or_a_percentage() -> None:
    assert Margin.parse("-0.5") == Margin(-0.5)
    assert Margin.parse(" 1% ") == Margin(0.01, relative=True)
    assert [str(Margin.parse(text)) for text in ("2.5%", "0.1", "0")] == ["2.5%", "0.1", "0"]
    for text in ("much", "nan", "inf", "100%", "%"):
        with pytest.raises(ValueError, match="margin: expected"):
            Margin.parse(text)


def log(seed: int, means: np.ndarray, n: int = 20_000, sign: float = 1.0) -> Judged:
    """One-step decisions by a uniform policy."""
    rng = np.random.default_rng(seed)
    taken = rng.integers(4, size=n)
    return Judged(
        rewards=sign * (rng.random(n) < means[taken]),
        lengths=np.ones(n, np.int64),
        behaviour_logp=np.full(n, np.log(0.25)),
        flat=rng.normal(size=(n, 1)),
        taken=taken,
    )


def verdict(data: Judged, margin: str, rules: Rules) -> str:
    candidate = TargetPolicy(np.log(FIRST[data.taken]), np.broadcast_to(FIRST, (len(data.flat), 4)))
    asked = replace(rules, margin=Margin.parse(margin))
    return judge(data, candidate, [Bar("log")], asked).verdict


@pytest.mark.parametrize("rules", [Rules(), Rules(reward_range=(0.0, 1.0))])
def test_better_by_at_least_and_not_worse_by_more(rules: Rules) -> None:
    """The candidate earns .20 of .50 more, so about 40 % more."""
    data = log(1, np.array([0.771, 0.41, 0.41, 0.41]))
    found = {text: verdict(data, text, rules) for text in ("0", "0.1", "0.3", "20%", "60%")}
    assert found == {
        "0": "better",
        "0.1": "better",
        "0.3": "worse",
        "20%": "better",
        "60%": "worse",
    }
    equal = log(2, np.full(4, 0.5))
    assert [verdict(equal, text, rules) for text in ("0", "-0.1", "-20%")] == [
        "cannot tell",
        "better",
        "better",
    ]


def test_a_share_of_costs_is_of_their_size() -> None:
    """Costs of .5 a step: 20 % less cost is better by 10 %, and not by 30 %."""
    data = log(3, np.array([0.4, 0.533, 0.533, 0.533]), sign=-1.0)
    rules = Rules(reward_range=(-1.0, 0.0))
    assert [verdict(data, text, rules) for text in ("10%", "30%")] == ["better", "worse"]


def test_the_difference_is_reported_without_the_margin() -> None:
    data = log(4, np.full(4, 0.5))
    candidate = TargetPolicy(np.log(FIRST[data.taken]), np.broadcast_to(FIRST, (len(data.flat), 4)))
    (plain,) = judge(data, candidate, [Bar("log")], Rules()).comparisons
    (with_margin,) = judge(
        data, candidate, [Bar("log")], Rules(margin=Margin.parse("10%"))
    ).comparisons
    assert with_margin.difference == pytest.approx(plain.difference)
    assert with_margin.margin == pytest.approx(0.1 * data.rewards.mean())
    assert with_margin.interval == pytest.approx(plain.interval, abs=3e-3)


def test_sampled_logging_weighs_the_margin_too() -> None:
    """Half of the episodes without a reward were logged: the margin is of all episodes' mean."""
    data = log(5, np.full(4, 0.5))
    rng = np.random.default_rng(6)
    kept = (data.rewards == 1) | (rng.random(data.rewards.size) < 0.5)
    sampled = Judged(
        rewards=data.rewards[kept],
        lengths=data.lengths[kept],
        behaviour_logp=data.behaviour_logp[kept],
        flat=data.flat[kept],
        taken=data.taken[kept],  # type: ignore[index]  # they are Discrete
        pass_prob=np.where(data.rewards[kept] == 1, 1.0, 0.5),
    )
    candidate = TargetPolicy(
        np.log(FIRST[sampled.taken]), np.broadcast_to(FIRST, (len(sampled.flat), 4))
    )
    (found,) = judge(
        sampled, candidate, [Bar("log")], Rules(margin=Margin.parse("10%"))
    ).comparisons
    assert found.margin == pytest.approx(0.1 * data.rewards.mean(), rel=0.02)
