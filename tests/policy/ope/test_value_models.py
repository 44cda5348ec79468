"""Reward models and cross-fitting: closed forms checked by independent computations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from policy.ope import estimators
from policy.ope.cross_fitting import EarlierScores, cross_fit
from policy.ope.value_models import (
    BoundedRewardModel,
    CandidateRewardModel,
    LinearRewardModel,
    RewardModel,
    SmoothedMeanRewardModel,
    expected_value,
)

ROOT = Path(__file__).parents[3]
OPEN_BANDIT = json.loads((ROOT / "tests/golden/ope_open_bandit.json").read_text())

MODELS: list[Callable[[], RewardModel]] = [
    lambda: SmoothedMeanRewardModel(3, start=5),
    lambda: LinearRewardModel(3, start=5),
]


def linear_log(n: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """r = 1 + (a + 1) x0 - x1 + a little noise, for a in 0..2; x1 has a large scale."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(n, 2)) * [1.0, 50.0] + [0.0, 300.0]
    actions = rng.integers(0, 3, n)
    rewards = 1 + (actions + 1) * obs[:, 0] - obs[:, 1] + rng.normal(0, 0.01, n)
    return obs, actions, rewards


# ------------------------------------------------------------------ smoothed means


@pytest.mark.parametrize("case", OPEN_BANDIT["cases"], ids=lambda case: case["log"])
def test_smoothed_means_are_the_golden_reward_model(case: dict[str, Any]) -> None:
    """(clicks_a + 1) / (n_a + 200) from the model gives the published DM and DR."""
    table = pd.read_parquet(ROOT / f"data/open_bandit/{case['log']}_all.parquet")
    actions, clicks = table["item_id"].to_numpy(), table["click"].to_numpy()
    probs = {"uniform": np.full(80, 1 / 80), "linear": (np.arange(80) + 1) / 3240}[case["target"]]
    obs = np.zeros((len(table), 0))
    model = SmoothedMeanRewardModel(80, prior_successes=1, prior_count=200)
    model.fit(obs, actions, clicks)
    episodes = estimators.Episodes.one_step(
        clicks,
        behaviour_prob=table["propensity_score"].to_numpy(),
        target_prob=probs[actions],
        q=model.q(obs, actions),
        v=expected_value(model, obs, np.broadcast_to(probs, (len(table), 80))),
    )
    assert estimators.dm(episodes).value == pytest.approx(case["dm"], abs=6e-11)
    assert estimators.dr(episodes).value == pytest.approx(case["dr"], abs=6e-11)


def test_smoothed_means_by_hand() -> None:
    """Two of three earned for action 5, no rows of action 7: prior mean 1/4."""
    model = SmoothedMeanRewardModel(3, prior_successes=1, prior_count=4, start=5)
    model.fit(np.zeros((4, 2)), [5, 5, 5, 6], [1.0, 1.0, 0.0, 0.5])
    expected = [3 / 7, 1.5 / 5, 1 / 4]
    assert model.q_all(np.zeros((2, 2))).tolist() == [expected, expected]
    assert model.q(np.zeros((2, 2)), [7, 5]).tolist() == [expected[2], expected[0]]


# ------------------------------------------------------------------ ridge regression


def test_linear_model_finds_a_linear_reward() -> None:
    """With many rows, each action's own slope is found, whatever the scale of a feature."""
    obs, actions, rewards = linear_log(6000)
    model = LinearRewardModel(3, l2=1e-3).fit(obs, actions, rewards)
    x = np.array([[0.5, 300.0], [-2.0, 310.0]])
    truth = [[1 + (a + 1) * x0 - x1 for a in range(3)] for x0, x1 in x]
    np.testing.assert_allclose(model.q_all(x), truth, atol=0.01)
    np.testing.assert_allclose(model.q(x, [2, 0]), [truth[0][2], truth[1][0]], atol=0.01)


def test_linear_model_minimises_what_its_docstring_says() -> None:
    """Both steps are the least squares of rows augmented by the penalty, solved by lstsq."""
    obs, actions, rewards = linear_log(60, seed=1)
    l2 = 7.0
    design = np.column_stack([(obs - obs.mean(0)) / obs.std(0), np.ones(60)])
    free = np.sqrt(l2) * np.diag([1.0, 1.0, 0.0])
    pooled = np.linalg.lstsq(np.vstack([design, free]), np.append(rewards, np.zeros(3)))[0]
    own = actions == 1
    stacked = np.vstack([design[own], np.sqrt(l2) * np.eye(3)])
    goal = np.append(rewards[own], np.sqrt(l2) * pooled)
    expected = design @ np.linalg.lstsq(stacked, goal)[0]
    model = LinearRewardModel(3, l2=l2).fit(obs, actions, rewards)
    np.testing.assert_allclose(model.q_all(obs)[:, 1], expected, rtol=1e-10)


def test_an_action_never_taken_is_judged_like_the_average_one() -> None:
    """No rows: the pooled ridge regression over all actions, here by augmented least squares."""
    obs, actions, rewards = linear_log(200)
    design = np.column_stack([(obs - obs.mean(0)) / obs.std(0), np.ones(200)])
    free = np.sqrt(10.0) * np.diag([1.0, 1.0, 0.0])
    pooled = np.linalg.lstsq(np.vstack([design, free]), np.append(rewards, np.zeros(3)))[0]
    q_all = LinearRewardModel(4, l2=10.0).fit(obs, actions, rewards).q_all(obs)
    np.testing.assert_allclose(q_all[:, 3], design @ pooled, rtol=1e-10)
    assert np.abs(q_all[:, 3] - q_all[:, 0]).max() > 0.5


def test_constant_and_missing_features_are_harmless() -> None:
    """With a constant column, or none at all, the means remain."""
    rewards = [1.0, 3.0, 5.0, 7.0]
    for obs in (np.full((4, 1), 0.1), np.zeros((4, 0))):
        model = LinearRewardModel(2, l2=1e-9).fit(obs, [0, 0, 1, 1], rewards)
        np.testing.assert_allclose(model.q_all(obs), [[2.0, 6.0]] * 4, rtol=1e-6)
    # The mean of six times 0.1 is not quite 0.1: that rounding is not a feature.
    obs, rewards = np.full((6, 1), 0.1), [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]
    model = LinearRewardModel(2, l2=1e-9).fit(obs, [0, 0, 0, 1, 1, 1], rewards)
    np.testing.assert_allclose(model.q_all([[0.2]]), [[2.0, 6.0]], rtol=1e-6)


def test_observations_of_any_shape_are_flattened() -> None:
    """(n, 2, 3) images of bytes are treated as (n, 6) numbers."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (50, 2, 3), dtype=np.uint8)
    actions, rewards = rng.integers(0, 2, 50), rng.normal(size=50)
    one = LinearRewardModel(2).fit(images, actions, rewards)
    other = LinearRewardModel(2).fit(images.reshape(50, 6).astype(float), actions, rewards)
    assert np.array_equal(one.q(images, actions), other.q(images.reshape(50, 6), actions))


@pytest.mark.parametrize("make", MODELS)
def test_q_is_the_column_of_q_all(make: Callable[[], RewardModel]) -> None:
    """In every model q selects the taken action from q_all, and refitting discards the earlier
    fit.
    """
    obs, actions, rewards = linear_log(100)
    model = make().fit(obs, actions + 5, rewards + 9).fit(obs, actions + 5, rewards)
    fresh = make().fit(obs, actions + 5, rewards)
    q_all = model.q_all(obs)
    assert q_all.shape == (100, 3)
    np.testing.assert_allclose(model.q(obs, actions + 5), q_all[np.arange(100), actions])
    np.testing.assert_array_equal(q_all, fresh.q_all(obs))


# ------------------------------------------------------------------ expectations, cross-fitting


def test_expected_value_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """sum_a p(a) q(a) row by row, however few rows fit into memory."""
    obs, actions, rewards = linear_log(40)
    model = LinearRewardModel(3).fit(obs, actions, rewards)
    probs = np.random.default_rng(0).dirichlet(np.ones(3), 40)
    expected = (probs * model.q_all(obs)).sum(axis=1)
    np.testing.assert_allclose(expected_value(model, obs, probs), expected, rtol=1e-12)
    monkeypatch.setattr("policy.ope.value_models.CELLS", 10)
    np.testing.assert_allclose(expected_value(model, obs, probs), expected, rtol=1e-12)


class RememberingModel(SmoothedMeanRewardModel):
    """Records the rows that it was fitted on (the observation is the row's number)."""

    def fit(
        self, obs: npt.ArrayLike, actions: npt.ArrayLike, rewards: npt.ArrayLike
    ) -> RememberingModel:
        self.seen = set(np.ravel(obs).tolist())
        return super().fit(obs, actions, rewards)

    def q_all(self, obs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        if self.seen & set(np.ravel(obs).tolist()):
            raise ValueError("scored a row that it was fitted on")
        return super().q_all(obs)


def test_no_row_is_scored_by_a_model_that_saw_its_episode() -> None:
    """Each episode is within one fold, folds have about equal size, and all rows are scored."""
    lengths = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    rows = int(lengths.sum())
    probs = np.tile([0.25, 0.75], (rows, 1))
    actions = np.arange(rows) % 2
    rewards = np.arange(rows, dtype=float)
    obs = np.arange(rows)[:, None]
    fitted = cross_fit(
        lambda: RememberingModel(2), obs, actions, rewards, probs,
        lengths=lengths, gamma=0.0, folds=3, rng=np.random.default_rng(0),
    )  # fmt: skip
    by_episode = np.split(fitted.fold, np.cumsum(lengths)[:-1])
    assert all(len(set(one.tolist())) == 1 for one in by_episode)
    assert sorted(np.bincount([one[0] for one in by_episode])) == [2, 3, 3]
    others = fitted.fold != 1
    model = SmoothedMeanRewardModel(2).fit(obs[others], actions[others], rewards[others])
    np.testing.assert_allclose(fitted.q[~others], model.q(obs[~others], actions[~others]))
    np.testing.assert_allclose(fitted.v[~others], model.q_all(obs[~others]) @ [0.25, 0.75])


def test_cross_fitting_takes_the_optimism_out_of_dm() -> None:
    """Pure noise, and a policy that copies the lucky actions: it looks good on seen rows only."""
    rng = np.random.default_rng(1)
    n, n_actions = 400, 100
    obs, actions, rewards = np.zeros((n, 1)), rng.integers(0, n_actions, n), rng.normal(size=n)

    def make() -> SmoothedMeanRewardModel:
        return SmoothedMeanRewardModel(n_actions)

    taken = np.eye(n_actions)[actions]
    fitted = cross_fit(make, obs, actions, rewards, taken, rng=rng)
    seen = make().fit(obs, actions, rewards)
    assert np.corrcoef(seen.q(obs, actions), rewards)[0, 1] > 0.3
    assert np.corrcoef(fitted.q, rewards)[0, 1] < 0.15


# ------------------------------------------------------------------ episodes of several steps

# A chain of four states: action 1 moves on and pays the value of the state, action 0 returns to the
# first state and pays 0.2. An episode ends after eight steps, or by action 1 in the last state.
WORTH = np.array([0.0, 0.0, 1.0, 5.0])
GAMMA, HORIZON = 0.9, 8


def chain(policy: npt.NDArray[np.float64], episodes: int, seed: int) -> tuple[Any, ...]:
    """One-hot states, actions, rewards, lengths and endings if action 1 has probability
    policy[state].
    """
    rng = np.random.default_rng(seed)
    states, actions, rewards, lengths, terminated = [], [], [], [], []
    for _ in range(episodes):
        state = 0
        for t in range(HORIZON):
            action = int(rng.random() < policy[state])
            states.append(state)
            actions.append(action)
            rewards.append(WORTH[state] if action else 0.2)
            over = action == 1 and state == 3
            if over or t == HORIZON - 1:
                lengths.append(t + 1)
                terminated.append(over)
                break
            state = state + 1 if action else 0
    columns = (actions, rewards, lengths, terminated)
    return np.eye(4)[states], *(np.array(column) for column in columns)


def true_value(policy: npt.NDArray[np.float64]) -> float:
    """The expected discounted return from the first state, by dynamic programming."""
    value = np.zeros(4)
    for _ in range(HORIZON):
        on = WORTH + GAMMA * np.append(value[1:], 0.0)
        value = policy * on + (1 - policy) * (0.2 + GAMMA * value[0])
    return float(value[0])


def chain_estimates(target: npt.NDArray[np.float64]) -> dict[str, estimators.Estimate]:
    behaviour = np.full(4, 0.5)
    obs, actions, rewards, lengths, terminated = chain(behaviour, 3000, seed=5)
    probs = np.column_stack([1 - target, target])[obs.argmax(axis=1)]
    fitted = cross_fit(
        lambda: LinearRewardModel(2, l2=1e-6), obs, actions, rewards, probs,
        lengths=lengths, terminated=terminated, gamma=GAMMA, rng=np.random.default_rng(0),
    )  # fmt: skip
    episodes = estimators.Episodes.from_flat(
        rewards,
        lengths=lengths,
        behaviour_logp=np.full(len(actions), np.log(0.5)),
        target_logp=np.log(probs[np.arange(len(actions)), actions]),
        q=fitted.q,
        v=fitted.v,
    )
    names = ("dm", "dr", "pdis", "v_behavior")
    return {name: estimators.ESTIMATORS[name](episodes, gamma=GAMMA) for name in names}


@pytest.mark.parametrize("on", [0.9, 0.5, 0.2])
def test_fitted_q_sees_what_follows(on: float) -> None:
    """dm finds the target's value in longer episodes, far from that of the logging policy. The
    doubly robust estimate, which is unbiased with any q, becomes more precise."""
    found, truth = chain_estimates(np.full(4, on)), true_value(np.full(4, on))
    assert found["dm"].value == pytest.approx(truth, rel=0.05)
    assert abs(found["dr"].value - truth) < 4 * found["dr"].stderr
    assert found["dr"].stderr < 0.8 * found["pdis"].stderr
    if on != 0.5:
        assert abs(found["v_behavior"].value - truth) > 0.25 * truth


def test_what_is_fitted_stays_within_what_can_be_earned() -> None:
    """A step at 1 leads to one at 2, known only to the line of the linear model. Each fit doubles
    the previous slope, unless the targets are bounded."""
    short, long, steps = 200, 10, 60
    lengths = np.array([2] * short + [steps] * long)
    obs = np.concatenate([np.tile([1.0, 2.0], short), np.zeros(long * steps)])[:, None]
    rewards = np.concatenate([np.tile([0.1, 0.0], short), np.zeros(long * steps)])
    fitted = cross_fit(
        lambda: LinearRewardModel(2, l2=1e-6), obs, np.arange(len(obs)) // 2 % 2, rewards,
        np.full((len(obs), 2), 0.5), lengths=lengths, terminated=lengths > 2, gamma=1.0,
        rng=np.random.default_rng(2),
    )  # fmt: skip
    most = steps * rewards.max()
    assert most < np.abs(fitted.v).max() < 3 * most


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(
    ("obs", "actions", "rewards", "message"),
    [
        (np.zeros((2, 1)), [0.5, 5.0], [0.0, 0.0], "Discrete.*float64.*not supported"),
        (np.zeros((2, 1)), [[5, 6], [6, 7]], [0.0, 0.0], r"Discrete.*\(2, 2\)"),
        (np.zeros((2, 1)), [5, 8], [0.0, 0.0], "expected 5 to 7, got 8 in row 1"),
        (np.zeros((2, 1)), [4, 5], [0.0, 0.0], "expected 5 to 7, got 4 in row 0"),
        (np.zeros((2, 1)), [5, 5], [0.0], r"rewards: expected shape \(2,\)"),
        (np.zeros((2, 1)), [5, 5], [0.0, np.nan], "rewards: .*nan in row 1"),
        (np.zeros((3, 1)), [5, 5], [0.0, 0.0], "obs: expected 2 rows, got 3"),
        ([[0.0], [np.inf]], [5, 5], [0.0, 0.0], "obs: expected finite"),
        ([{"a": 1}, {"a": 2}], [5, 5], [0.0, 0.0], "flatten"),
    ],
)
def test_bad_rows_are_refused(
    make: Callable[[], RewardModel], obs: Any, actions: Any, rewards: Any, message: str
) -> None:
    """The error says what was expected, what came, and in which row."""
    with pytest.raises(ValueError, match=message):
        make().fit(obs, actions, rewards)


@pytest.mark.parametrize("make", MODELS)
def test_a_model_that_was_not_fitted_says_so(make: Callable[[], RewardModel]) -> None:
    """Neither q nor q_all can be called before fit."""
    with pytest.raises(ValueError, match="call fit"):
        make().q(np.zeros((1, 1)), [5])
    with pytest.raises(ValueError, match="call fit"):
        make().q_all(np.zeros((1, 1)))


def test_other_misuse_is_named() -> None:
    """Settings, widths, probabilities and folds."""
    obs, actions, rewards = linear_log(4)
    probs, rng = np.full((4, 3), 1 / 3), np.random.default_rng(0)
    model = LinearRewardModel(3).fit(obs, actions, rewards)

    def fold(**change: Any) -> None:
        given = {"target_probs": probs, "rng": rng, "rewards": rewards, **change}
        cross_fit(lambda: LinearRewardModel(3), obs, actions, **given)

    refused: list[tuple[str, Callable[[], object]]] = [
        ("n_actions", lambda: LinearRewardModel(0)),
        ("l2", lambda: LinearRewardModel(2, l2=0)),
        ("prior_count", lambda: SmoothedMeanRewardModel(2, prior_count=0)),
        ("at least one row", lambda: LinearRewardModel(2).fit(np.zeros((0, 1)), np.arange(0), [])),
        ("expected 2 numbers a row.*got 1", lambda: model.q_all(np.zeros((1, 1)))),
        ("sum to 1.*row 0", lambda: expected_value(model, obs, probs * 0.9)),
        (r"\(4, A\)", lambda: expected_value(model, obs, probs[0])),
        ("3 probabilities", lambda: expected_value(model, obs, np.full((4, 2), 0.5))),
        ("folds: expected 2 to 4.*got 5", lambda: fold(folds=5)),
        ("folds: expected 2 to 2.*got 1", lambda: fold(folds=1, lengths=[2, 2])),
        ("lengths: expected to sum to 4", lambda: fold(lengths=[2, 1])),
        ("rewards: expected 4 rows", lambda: fold(rewards=rewards[:3])),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_bounded_model_bounds_q_and_what_is_expected_of_it():
    """v is the expectation of the q that is used; otherwise doubly robust estimates would be
    biased.
    """
    rng = np.random.default_rng(0)
    obs, actions = rng.normal(size=(300, 1)), rng.integers(3, size=300)
    rewards = (obs[:, 0] > 0).astype(np.float64)
    probs = np.tile([0.2, 0.3, 0.5], (300, 1))
    plain = LinearRewardModel(3).fit(obs, actions, rewards)
    assert plain.q_all(obs).max() > 1.2
    for limits in (None, (0.0, 1.0)):
        model = BoundedRewardModel(LinearRewardModel(3), limits).fit(obs, actions, rewards)
        values = model.q_all(obs)
        assert (values.min(), values.max()) == (0.0, 1.0)
        assert model.q(obs, actions) == pytest.approx(values[np.arange(300), actions])
        assert expected_value(model, obs, probs) == pytest.approx((probs * values).sum(axis=1))


def test_earlier_rows_alone_score_a_row():
    """A change of one row changes no score up to the end of its own stretch; the first rows have
    the mean of those before. Blocks and later rows change no score."""
    rng = np.random.default_rng(1)
    obs, actions, rewards = rng.normal(size=(640, 1)), rng.integers(2, size=640), rng.random(640)
    probs = [np.tile(p, (640, 1)) for p in ([0.5, 0.5], [0.0, 1.0])]

    def scored(given, blocks=1, rows=640):
        scores, found = EarlierScores(2, (-50.0, 50.0)), []
        for part in np.array_split(np.arange(rows), blocks):
            own = [one[part] for one in probs]
            q, values = scores.scored(obs[part], actions[part], given[part], own)
            found.append(np.stack([q, *values]))
        return np.concatenate(found, axis=1)

    q, both, second = scored(rewards)
    before = (np.cumsum(rewards) - rewards)[:64] / np.maximum(np.arange(64), 1)
    assert q[:64] == pytest.approx(before)
    assert both[:64] == pytest.approx(before)
    assert q[actions == 1][64:] == pytest.approx(second[actions == 1][64:])
    changed = rewards.copy()
    changed[100] = 50.0
    other, _, _ = scored(changed)
    assert (other[:128] == q[:128]).all()
    assert (other[128:] != q[128:]).all()
    assert scored(rewards, blocks=11) == pytest.approx(np.stack([q, both, second]))
    assert scored(rewards, rows=300)[0] == pytest.approx(q[:300])


def test_rows_may_be_added_in_blocks():
    """The sums of blocks give the fit of all rows, at any scale and far from 0."""
    obs, actions, rewards = linear_log(600)
    obs[:, 1] += 1e6
    model = LinearRewardModel(3)
    for part in np.array_split(np.arange(600), 7):
        model.add(obs[part], actions[part], rewards[part])
    fitted = LinearRewardModel(3).fit(obs, actions, rewards)
    assert model.solved().q_all(obs) == pytest.approx(fitted.q_all(obs), rel=1e-9)


def test_one_model_of_all_candidates_recovers_a_bilinear_reward():
    """Of a candidate wherever it stands; of one that was never shown, by its features."""
    rng = np.random.default_rng(4)
    rows, most, width = 4_000, 3, 2
    states, items = rng.normal(size=(rows, 2)), rng.normal(size=(rows, most, width))
    taste = np.array([[1.0, -2.0], [0.5, 3.0]])
    value = 0.5 + np.einsum("nu,uf,nkf->nk", states, taste, items) + items[:, :, 0]
    actions = rng.integers(0, most, rows)
    obs = np.concatenate([states, items.reshape(rows, -1), np.ones((rows, most))], axis=1)
    model = CandidateRewardModel(most, width, l2=1e-6, start=2)
    model.fit(obs, actions + 2, value[np.arange(rows), actions])
    np.testing.assert_allclose(model.q_all(obs), value, atol=1e-6)
    np.testing.assert_allclose(
        model.q(obs, actions + 2), value[np.arange(rows), actions], atol=1e-6
    )
    with pytest.raises(ValueError, match="expected 9 or more numbers a row"):
        model.q_all(obs[:, :8])
