"""The demo's log with a known truth: its policy's value, and when two numbers agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.demo.digits import EXPLORED, FILE, _measure, _read, weak_policy

DATA = Path(__file__).parents[3] / "data"


def test_the_weak_policy_knows_little_and_its_chances_are_probabilities() -> None:
    """Each row sums to 1, every digit has a chance, and the value is far from the best."""
    images, digits = _read(DATA / FILE)
    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert np.bincount(digits).min() > 170
    chances = weak_policy(images, digits, np.random.default_rng(3))
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)
    assert chances.min() == pytest.approx(EXPLORED / 10)
    assert 0.1 < chances[np.arange(len(digits)), digits].mean() < 0.4


@pytest.mark.parametrize(("value", "agrees"), [(0.5, True), (0.53, True), (0.7, False)])
def test_two_numbers_agree_within_both_errors(value: float, agrees: bool) -> None:
    """A prediction with an error of 0.01, and 1,000 rewards of which half are 1."""
    log = {"target": [{"name": "ips", "value": 0.0, "stderr": 0.0},
                      {"name": "dr", "value": value, "stderr": 0.01}]}  # fmt: skip
    found = _measure({"logs": [log]}, np.arange(1000) % 2.0)
    assert found["agrees"] is agrees
    assert found["measured"]["value"] == 0.5
