"""GAE: golden numbers, brute force, and fragments that are independent of each other."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.algorithms.advantages import gae

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())
CASE = GOLDEN["gae"]
ROWS = (CASE["r"], CASE["v"], CASE["v_next"])
TERMINATED = np.isin(np.arange(4), CASE["terminated_at"])
ENDS = TERMINATED | np.isin(np.arange(4), CASE["truncated_at"])
FORMS = {"terminated": TERMINATED, "ends": ENDS, "gamma": CASE["gamma"]}


def test_gae_gives_the_golden_numbers():
    """A terminated row does not bootstrap, a truncated one does from its next value."""
    result = gae(*ROWS, **FORMS, lam=CASE["lambda"])
    np.testing.assert_allclose(result.advantages, CASE["advantages"], atol=1e-12)
    np.testing.assert_allclose(result.value_targets, CASE["value_targets"], atol=1e-12)


@st.composite
def fragments(draw):
    """(rewards, values, next values, terminated, ends) of 1 to 30 rows."""
    count = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ends = rng.random(count) < 0.3
    ends[-1] = True
    terminated = ends & (rng.random(count) < 0.5)
    return (*rng.normal(size=(3, count)), terminated, ends)


@given(fragments(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors(case, gamma, lam):
    """Checked against the definition, term by term."""
    r, v, after, terminated, ends = case
    found = gae(r, v, after, terminated=terminated, ends=ends, gamma=gamma, lam=lam)
    delta = r + gamma * np.where(terminated, 0.0, after) - v
    for t in range(len(r)):
        last = t + int(np.argmax(ends[t:]))
        expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, last + 1))
        assert found.advantages[t] == pytest.approx(expected, abs=1e-9)
    np.testing.assert_allclose(found.value_targets, found.advantages + v)


@given(fragments())
def test_a_fragment_knows_nothing_of_the_others(case):
    """A fragment's advantages are the same alone or among other fragments."""
    r, v, after, terminated, ends = case
    forms = {"gamma": 0.9, "lam": 0.8}
    together = gae(r, v, after, terminated=terminated, ends=ends, **forms)
    start = 0
    for stop in (np.flatnonzero(ends) + 1).tolist():
        at = slice(start, stop)
        alone = gae(
            r[at], v[at], after[at], terminated=terminated[at], ends=ends[at], **forms
        )  # fmt: skip
        np.testing.assert_allclose(together.advantages[at], alone.advantages)
        np.testing.assert_allclose(together.value_targets[at], alone.value_targets)
        start = stop


def test_columns_that_do_not_fit_are_refused():
    """Columns of another length, or rows that continue beyond the last."""
    with pytest.raises(ValueError, match="one length"):
        gae([1, 2], [1], [1], terminated=[False], ends=[True], gamma=1, lam=1)
    with pytest.raises(ValueError, match="last row"):
        gae([1], [1], [1], terminated=[False], ends=[False], gamma=1, lam=1)
