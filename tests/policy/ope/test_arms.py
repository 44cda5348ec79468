"""Arms of a canary: bounds valid at every look, a wrong share, failures that count."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from policy.ope.arms import (
    MISMATCH,
    ArmsComparison,
    assignment_differences,
    compare_arms,
    episodes_needed,
    log_evidence_of_mismatch,
)
from policy.ope.margins import Margin

LIMITS = (0.0, 1.0)


def looked_at(
    rng: np.random.Generator,
    canary: float,
    live: float,
    *,
    share: float = 0.2,
    n: int = 4000,
    looks: int = 5,
    limits: tuple[float, float] | None = LIMITS,
) -> set[str]:
    """The verdicts of several looks at Bernoulli returns with these means."""
    arm = rng.random(n) < share
    returns = (rng.random(n) < np.where(arm, canary, live)).astype(float)
    failed = np.zeros(n, bool)
    found = set()
    for m in np.linspace(n / looks, n, looks).astype(int):
        one = compare_arms(returns[:m], arm[:m], failed[:m], share=share, limits=limits)
        found.add(one.verdict)
    return found


@pytest.mark.parametrize("limits", [LIMITS, None])
def test_an_equal_canary_is_seldom_called_otherwise(limits: tuple[float, float] | None) -> None:
    """Over five looks the error is at most 5 %, and 60 logs give at most 10 with 99.9 %."""
    rng = np.random.default_rng(1)
    wrong = sum(looked_at(rng, 0.3, 0.3, limits=limits) != {"cannot tell"} for _ in range(60))
    assert wrong <= 10


@pytest.mark.parametrize("limits", [LIMITS, None])
def test_a_difference_is_found_both_ways(limits: tuple[float, float] | None) -> None:
    rng = np.random.default_rng(2)
    for canary, verdict in ((0.5, "better"), (0.1, "worse")):
        found = [looked_at(rng, canary, 0.3, limits=limits) for _ in range(20)]
        assert sum(verdict in one for one in found) >= 18
        assert not any({"better", "worse"} <= one for one in found)


def test_the_size_that_is_said_to_be_needed_is_about_enough() -> None:
    """Power 0.8: of 30 logs, 17 or more are decided with 99.9 %. Rare events need more than their
    variance suggests."""
    rng = np.random.default_rng(3)
    for live, canary, share, limits in (
        (0.3, 0.36, 0.2, LIMITS),
        (0.3, 0.36, 0.2, None),
        (0.05, 0.075, 0.5, LIMITS),
        (0.05, 0.025, 0.1, LIMITS),
    ):
        width = None if limits is None else 1.0
        deviation, apart = (live * (1 - live)) ** 0.5, abs(canary - live)
        n = episodes_needed(deviation, apart, share, 0.05 / 3, width=width)
        found = [
            looked_at(rng, canary, live, share=share, n=n, looks=1, limits=limits)
            for _ in range(30)
        ]
        verdict = "better" if canary > live else "worse"
        assert sum(one == {verdict} for one in found) >= 17, (live, share, limits, n)


@pytest.mark.parametrize(("live", "canary"), [(0.05, 0.1), (0.3, 0.18)])
def test_equal_arms_need_the_fewest_episodes(live: float, canary: float) -> None:
    """The number depends only on how far the share is from a half, and grows with that, up to one
    step of the rounding. At each share it is enough: of 30 logs, 17 or more with 99.9 %."""
    rng = np.random.default_rng(8)
    deviation, apart = (live * (1 - live)) ** 0.5, abs(canary - live)
    needed = {
        percent: episodes_needed(deviation, apart, percent / 100, 0.05 / 3, width=1.0)
        for percent in range(5, 100, 5)
    }
    numbers = [*needed.values()]
    assert numbers == numbers[::-1]
    assert all(nearer <= 1.1 * further for further, nearer in pairwise(numbers[:10])), numbers
    verdict = "better" if canary > live else "worse"
    for percent in (5, 30, 50, 70, 95):
        share, n = percent / 100, needed[percent]
        found = [looked_at(rng, canary, live, share=share, n=n, looks=1) for _ in range(30)]
        assert sum(one == {verdict} for one in found) >= 17, (percent, n)


def judged(failures: tuple[float, float], split: float = 0.2) -> ArmsComparison:
    """Equal returns; failure rates of (canary, live); the true split for a share of 0.2."""
    rng = np.random.default_rng(4)
    arm = rng.random(4000) < split
    failed = rng.random(4000) < np.where(arm, *failures)
    return compare_arms(rng.random(4000), arm, failed, share=0.2, limits=LIMITS)


def test_a_canary_that_breaks_episodes_is_worse() -> None:
    """A separate guardrail, whatever the intact episodes earn."""
    found = judged((0.2, 0.05))
    assert found.verdict == "worse"
    assert "abandoned or broken" in found.reasons[0]
    assert judged((0.05, 0.05)).verdict == "cannot tell"


@pytest.mark.parametrize("arm", [True, False])
def test_a_return_outside_of_its_limits_is_not_compared(arm: bool) -> None:
    """The limits are a promise for both arms; the reason names them. Failures have other limits."""
    rng = np.random.default_rng(9)
    in_canary = rng.random(4000) < 0.2
    returns = (rng.random(4000) < 0.3).astype(float)
    returns[np.flatnonzero(in_canary == arm)[100]] = 5.0
    failed = np.zeros(4000, bool)
    found = compare_arms(returns, in_canary, failed, share=0.2, limits=LIMITS)
    assert (found.verdict, found.returns, found.missing) == ("cannot tell", None, None)
    told = "1 return outside of the declared range 0 to 1, from 0 to 5: fix the range"
    assert found.reasons == (told,)
    assert found.failures is not None
    assert compare_arms(returns, in_canary, in_canary, share=0.2, limits=LIMITS).verdict == "worse"


@pytest.mark.parametrize("odd", [1e200, -np.inf, np.nan])
def test_returns_whose_squares_overflow_are_not_compared(odd: float) -> None:
    """Without limits, too, the result is strict JSON that names the cause."""
    rng = np.random.default_rng(9)
    in_canary, returns = rng.random(4000) < 0.2, rng.random(4000)
    returns[7] = odd
    found = compare_arms(returns, in_canary, np.zeros(4000, bool), share=0.2, limits=None)
    assert found.reasons[0].startswith("1 return beyond 1e+140")
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_wrong_share_refuses_the_comparison() -> None:
    """Episodes of one arm are lost: the rest cannot be compared, however clear the result looks."""
    found = judged((0.0, 0.0), split=0.16)
    assert (found.verdict, found.returns, found.failures) == ("cannot tell", None, None)
    assert found.mismatch is not None
    assert "not the share of 0.2" in found.mismatch


def test_a_right_share_is_hardly_ever_refused() -> None:
    """Checked after every 20 episodes: at most 3 of 300 logs, as the error is at most 1 in 1000."""
    rng, refused = np.random.default_rng(5), 0
    for _ in range(300):
        counts = np.cumsum(rng.random(2000) < 0.1)
        refused += any(
            log_evidence_of_mismatch(int(counts[n - 1]), n, 0.1) >= MISMATCH
            for n in range(20, 2001, 20)
        )
    assert refused <= 3


def test_differences_have_the_difference_as_their_mean() -> None:
    """The level that both arms share is subtracted, and does not widen the bound."""
    rng = np.random.default_rng(6)
    arm = rng.random(50_000) < 0.1
    values = 1000 + rng.normal(size=50_000) + arm * 0.5
    apart = assignment_differences(values, arm, 0.1)
    assert apart.mean() == pytest.approx(0.5, abs=0.1)
    assert apart.std() < 6


def test_one_arm_alone_tells_nothing() -> None:
    found = compare_arms(np.ones(3), np.zeros(3, bool), np.zeros(3, bool), share=0.1, limits=None)
    assert (found.verdict, found.to_dict()["n"]) == ("cannot tell", {"canary": 0, "live": 3})


def test_what_is_missing_fills_both_arms() -> None:
    """A normal limit needs 100 episodes in each, however large the difference is."""
    arm = np.arange(100) % 5 == 0
    returns = arm + 0.1 * (np.arange(100) % 2)
    found = compare_arms(returns, arm, np.zeros(100, bool), share=0.2, limits=None)
    few, apart = found.reasons
    assert few == "expected 100 episodes in each arm, got 20 and 80"
    assert found.missing == 400  # of which a fifth are the canary's
    assert apart.startswith("about 400 more episodes, of both versions together")


@pytest.mark.parametrize("limits", [(0.0, 1.0), None])
def test_a_margin_moves_what_the_canary_has_to_exceed(limits):
    """The canary earns .6, the live version .5: better by .05 or 10 %, not by .15 or 30 %."""
    rng, n = np.random.default_rng(8), 20_000
    in_canary = rng.random(n) < 0.5
    returns = (rng.random(n) < np.where(in_canary, 0.6, 0.5)).astype(float)

    def verdict(margin, values=returns, asked_limits=limits):
        found = compare_arms(
            values,
            in_canary,
            np.zeros(n, bool),
            share=0.5,
            limits=asked_limits,
            margin=Margin.parse(margin),
        )
        return found.verdict, found.returns

    verdicts = [verdict(text)[0] for text in ("0.05", "10%", "0.15", "35%")]
    assert verdicts == ["better", "better", "worse", "worse"]
    assert verdict("10%")[1].margin == pytest.approx(0.05, rel=0.02)
    costs = -(rng.random(n) < 0.5).astype(float)
    below = None if limits is None else (-1.0, 0.0)
    assert verdict("-10%", costs, below)[0] == "better", "not worse by more than a tenth"
    low, high = verdict("0", costs, below)[1].interval
    assert low < 0 < high


@pytest.mark.parametrize("limits", [LIMITS, None])
def test_lost_failures_are_named_where_they_would_explain_the_verdict(limits):
    """Equal arms of 20 % failures, a third of the canary's never logged: it has fewer episodes and
    no more successes. Mirrored, the live version's are the ones that are lost."""
    rng, n = np.random.default_rng(5), 16_000
    in_canary = rng.random(n) < 0.5
    failed = rng.random(n) < 0.2
    kept = ~(in_canary & failed & (rng.random(n) < 0.33))
    none = np.zeros(int(kept.sum()), bool)
    asked = {"share": 0.5, "limits": limits, "started": {}}
    found = compare_arms(1.0 - failed[kept], in_canary[kept], none, **asked)
    assert found.verdict == "better"
    assert "fewer than its share of 0.5, and has not surely earned more in total" in found.note
    mirrored = compare_arms(1.0 - failed[kept], ~in_canary[kept], none, **asked)
    assert mirrored.verdict == "worse"
    assert mirrored.note.startswith("the live version's mean is higher")


@pytest.mark.parametrize("limits", [LIMITS, None])
def test_a_verdict_that_losses_would_explain_waits_where_an_arm_lacks_episodes(limits):
    """The odd source has 4 % fewer of the canary's episodes than its share, 2.7 standard errors:
    enough to let this verdict wait, and too little to refuse a comparison. In all 10 are missing.
    """
    rng, n = np.random.default_rng(8), 16_000
    in_canary = rng.permutation(n) < 7990
    returns = (rng.random(n) < np.where(in_canary, 0.83, 0.8)).astype(float)
    none = np.zeros(n, bool)
    even = {"fine": (5990, 12_000), "odd": (2000, 4000)}
    odd = {"fine": (6075, 12_000), "odd": (1915, 4000)}
    asked = {"share": 0.5, "limits": limits}
    found = compare_arms(returns, in_canary, none, started=even, **asked)
    assert (found.verdict, found.mismatch) == ("better", None)
    assert "fewer than its share of 0.5" in found.note
    waits = compare_arms(returns, in_canary, none, started=odd, **asked)
    assert (waits.verdict, waits.mismatch, waits.note) == ("cannot tell", None, "")
    assert waits.reasons == (found.note,)
    mirrored = {name: (of - own, of) for name, (own, of) in odd.items()}
    again = compare_arms(returns, ~in_canary, none, started=mirrored, **asked)
    assert again.verdict == "cannot tell"
    assert again.reasons[0].startswith("the live version's mean is higher")


def test_an_arm_that_is_short_but_earns_more_in_total_needs_no_note():
    """48 % of the episodes, and 60 % more successes each: no lost failure explains that."""
    in_canary = np.arange(4000) % 2 == 0
    in_canary[:160:2] = False
    rng = np.random.default_rng(3)
    returns = (rng.random(4000) < np.where(in_canary, 0.64, 0.4)).astype(float)
    found = compare_arms(returns, in_canary, np.zeros(4000, bool), share=0.5, limits=None)
    assert found.n[0] < 2000
    assert (found.verdict, found.note) == ("better", "")


def test_a_loss_in_one_source_is_seen_before_that_in_the_sum():
    """A tenth of the canary's episodes of one of four sources are missing."""
    returns, in_canary = np.zeros(2000), np.arange(2000) % 2 == 0
    fine = {f"{number}": (5000, 10_000) for number in range(3)}
    asked = {"share": 0.5, "limits": LIMITS}
    lost = {**fine, "odd": (4300, 9300)}
    total = {"": (19_300, 39_300)}
    none = np.zeros(2000, bool)
    assert compare_arms(returns, in_canary, none, started=total, **asked).mismatch is None
    found = compare_arms(returns, in_canary, none, started=lost, **asked)
    assert found.mismatch is not None
    assert "4,300 of 9,300 episodes from odd" in found.mismatch
    even = {**fine, "odd": (5000, 10_000)}
    assert compare_arms(returns, in_canary, none, started=even, **asked).mismatch is None
