"""Candidates judged by the same episodes share one error, from the second one on."""

from __future__ import annotations

import pytest

from policy.ope.alpha_budget import candidates_note, confidence_of


def test_the_first_candidate_has_its_own_error() -> None:
    assert confidence_of(1, 0.95, None) == 0.95
    assert candidates_note(1, 0.95, None) == []


def test_all_errors_together_keep_the_default_budget() -> None:
    """6 / (2 pi)^2 = .152 of .05 is the second one's error; a thousand of them spend below .05."""
    assert (1 - confidence_of(2, 0.95, None)) / 2 == pytest.approx(0.05 * 0.15198, rel=1e-4)
    errors = [(1 - confidence_of(number, 0.95, None)) / 2 for number in range(1, 1001)]
    assert sum(errors) < 0.05
    assert errors == sorted(errors, reverse=True)


def test_a_given_budget_applies_to_the_first_one_too() -> None:
    assert (1 - confidence_of(1, 0.95, 0.01)) / 2 == pytest.approx(0.01 * 0.60793, rel=1e-4)
    for budget in (0.0, 1.0):
        with pytest.raises(ValueError, match="alpha_budget: expected a probability"):
            confidence_of(1, 0.95, budget)


def test_the_note_has_the_price_what_is_left_and_what_a_plain_gate_means() -> None:
    """By hand for the third: .05 * .06755 = .0034; left .05 * (1 - .8274) = .0086; 1 - .975^3."""
    (note,) = candidates_note(3, 0.95, None)
    assert (note.passed, note.threshold, note.value) == (True, None, 3)
    assert "its error is 0.0034 of 0.05 for all of them together, and 0.0086 is left" in (
        note.sentence
    )
    assert "At 0.025 each, one or more of 3 equal candidates would be called better" in (
        note.sentence
    )
    assert "up to 0.073;" in note.sentence
