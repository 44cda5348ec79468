"""A cap for amounts of money: given, or from the first tenth of a log."""

from __future__ import annotations

import numpy as np
import pytest

from policy.ope.reward_cap import AUTO, cap_note, parse_cap, proposed_cap


def test_a_cap_is_a_number_or_auto() -> None:
    assert (parse_cap(None), parse_cap("50"), parse_cap("auto")) == (None, 50.0, AUTO)
    for text in ("inf", "nan", "much"):
        with pytest.raises(ValueError, match="reward_cap: expected a finite number or auto"):
            parse_cap(text)


def test_the_proposal_is_the_highest_cap_that_no_reward_dominates() -> None:
    """By hand: 200 rewards of 1 and one of 100. Capped at 1, each has 1 / 201 of the squares."""
    assert proposed_cap(np.array([1.0] * 200 + [100.0])) == 1.0
    # three of 2 and 400 of 1: 4 / 412 is below 1 %, so 2 is the highest
    assert proposed_cap(np.array([50.0, 2, 2, *[1.0] * 400])) == 2.0


def test_there_is_no_proposal_where_no_cap_helps() -> None:
    assert proposed_cap(np.ones(1000)) is None, "no reward dominates"
    assert proposed_cap(np.array([1.0] * 50)) is None, "too few, at any cap"
    assert proposed_cap(-np.ones(1000)) is None
    assert proposed_cap(np.empty(0)) is None


def test_the_note_counts_what_is_above() -> None:
    found = cap_note(50.0, 3, 400)
    assert (found.name, found.passed, found.value) == ("reward_cap", True, 3 / 400)
    assert found.sentence == (
        "judged is min(reward, 50): 3 steps (0.75%) earned more and count as 50"
    )
