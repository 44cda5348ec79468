"""The bandit learner finds the better policy in a log, and counts the rows that it left out."""

import math

import numpy as np
import pytest
import torch

from policy.algorithms.bandit import Bandit, BanditConfig
from policy.algorithms.learner import Learner
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete, MultiDiscrete

SPEC = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(16,), value_head=False))


def trained(batch, spec=SPEC, seed=0, **settings):
    config = BanditConfig(**{"lr": 3e-3, "entropy_coeff": 0.0, **settings})
    learner = Learner(Policy(spec, seed=seed), config, seed=seed)
    metrics = learner.update(batch)
    return learner, metrics


@pytest.mark.parametrize("objective", ["ips", "snips", "dr"])
def test_it_finds_the_best_policy_of_a_known_problem(bandit_log, objective):
    """The log earns 0.18, mostly from the useless action; the learned policy 0.81 of 0.9."""
    learner, _ = trained(bandit_log(4000).batch(), objective=objective, updates=500)
    fresh = bandit_log(2000, seed=1).obs
    probabilities = learner.policy.to_numpy().probabilities(fresh)
    best = np.where(fresh[:, 0] > 0, 0, 2)
    assert 0.9 * probabilities[np.arange(len(fresh)), best].mean() > 0.81


@pytest.mark.parametrize("objective", ["ips", "dr"])
def test_it_beats_the_logging_policy_on_digits(objective):
    """scikit-learn's digits as a bandit: at least twice the logging policy's accuracy."""
    # loaded only by the worker that needs it, as it takes a second
    from sklearn.datasets import load_digits  # noqa: PLC0415

    rng = np.random.default_rng(0)
    images, labels = load_digits(return_X_y=True)
    obs = (images / 16).astype(np.float32)
    # A logging policy that is right 40 % of the time, and uniform otherwise.
    prob = np.full((len(obs), 10), 0.6 / 9)
    prob[np.arange(len(obs)), labels] = 0.4
    actions = np.array([rng.choice(10, p=row) for row in prob])
    rewards = (actions == labels).astype(np.float64)
    train, test = np.arange(len(obs)) < 1300, np.arange(len(obs)) >= 1300
    batch = SampleBatch(
        obs=obs,
        actions=actions,
        rewards=rewards,
        action_logp=np.log(prob[np.arange(len(obs)), actions]),
        t=np.zeros(len(obs), np.int64),
        terminateds=np.ones(len(obs), np.bool_),
        truncateds=np.zeros(len(obs), np.bool_),
    )
    spec = PolicySpec(Box((64,)), Discrete(10), ModuleSpec(hidden=(64,), value_head=False))
    settings = {"objective": objective, "updates": 500, "minibatch": 128, "entropy_coeff": 0.05}
    learner, _ = trained(batch.take(train), spec, **settings)
    right = learner.policy.to_numpy().act(obs[test], rng, explore=False).columns[""]
    accuracy = (right == labels[test]).mean()
    assert accuracy > 2 * rewards[test].mean()


def loss_of(objective, log, **settings):
    """(torch loss, the parts of the formula) on the whole batch."""
    learner = Learner(Policy(SPEC, seed=3), BanditConfig(objective=objective, **settings))
    rows = learner.algorithm._rows(log.batch(), np.random.default_rng(0))
    loss = float(learner.algorithm.loss(rows, 0.25).detach())
    probabilities = learner.policy.to_numpy().probabilities(log.obs)
    taken = probabilities[np.arange(len(log.obs)), log.actions - 1]
    return loss, probabilities, taken / np.exp(log.logp), rows


def test_losses_are_those_of_the_formulas(bandit_log):
    """IPS, SNIPS and DR with clipping and entropy, computed in numpy on 200 rows, within 1e-6."""
    log = bandit_log(200)
    for objective in ("ips", "snips", "dr"):
        loss, pi, w, rows = loss_of(objective, log, weight_clip=1.2, entropy_coeff=0.5)
        assert (w > 1.2).any()
        w = np.minimum(w, 1.2)
        if objective == "ips":
            value = (w * (log.rewards - 0.25)).mean()
        elif objective == "snips":
            value = (w * log.rewards).sum() / w.sum()
        else:
            q_all, q = rows.q_all.numpy(), rows.q.numpy()
            np.testing.assert_array_equal(q, q_all[np.arange(200), log.actions - 1])
            value = ((pi * q_all).sum(axis=1) + w * (log.rewards - q)).mean()
        entropy = -(pi * np.log(pi)).sum(axis=1).mean()
        assert loss == pytest.approx(-value - 0.5 * entropy, abs=1e-6)


def test_the_reward_model_never_judges_a_row_it_was_fitted_on(bandit_log):
    """Changing one row's reward changes no q of that row."""
    log = bandit_log(100)
    before = loss_of("dr", log)[3].q_all
    log.rewards[7] += 100
    after = loss_of("dr", log)[3].q_all
    assert torch.equal(before[7], after[7])
    assert not torch.equal(before, after)


def test_rows_that_cannot_be_used_are_excluded_and_counted(bandit_log):
    """No propensity, several steps, abandoned, broken: one reason each; the other rows are used."""
    log = bandit_log(100)
    log.logp[:7] = np.nan
    log.ended[0:3] = ["abandoned"] * 3
    log.ended[10] = "broken"
    batch = log.batch()
    batch["t"] = np.where(np.arange(100) == 20, 1, 0)
    batch["terminateds"] = np.where(np.arange(100) == 21, False, batch["terminateds"])
    learner, metrics = trained(batch, epochs=1)
    expected = {"abandoned": 3, "broken": 1, "not_one_step": 2, "no_propensity": 4}
    assert learner.counts.excluded == expected
    assert metrics["rows"] == learner.counts.rows_trained == 90
    assert learner.counts.rows_read == 100


def test_entropy_coefficient_keeps_the_policy_open(bandit_log):
    """A large coefficient holds the policy near uniform."""
    batch = bandit_log(500).batch()
    free = trained(batch, updates=100)[1]["entropy"]
    held = trained(batch, updates=100, entropy_coeff=10.0)[1]["entropy"]
    assert held > 0.99 * math.log(3) > free


def test_it_learns_in_other_action_spaces_by_ips():
    """MultiDiscrete: the first choice should follow the sign of the observation."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(2000, 1)).astype(np.float32)
    actions = rng.integers(0, 2, size=(2000, 2))
    batch = SampleBatch(
        obs=obs,
        actions=actions,
        rewards=(actions[:, 0] == (obs[:, 0] > 0)).astype(np.float64),
        action_logp=np.full(2000, np.log(0.25)),
        t=np.zeros(2000, np.int64),
        terminateds=np.ones(2000, np.bool_),
        truncateds=np.zeros(2000, np.bool_),
    )
    spec = PolicySpec(Box((1,)), MultiDiscrete((2, 2)), ModuleSpec(hidden=(8,)))
    learner, _ = trained(batch, spec, epochs=10)
    chosen = learner.policy.to_numpy().act(obs, rng, explore=False).columns[""]
    assert (chosen[:, 0] == (obs[:, 0] > 0)).mean() > 0.9
    with pytest.raises(ValueError, match="objective dr: expected a Discrete action space"):
        BanditConfig(objective="dr").build(Policy(spec))


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "hope"},
        {"epochs": 0},
        {"lr": math.nan},
        {"weight_clip": 0.0},
        {"entropy_coeff": -1.0},
        {"baseline": math.inf},
        {"folds": 1},
        {"reward_model": "deep"},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    """The error names the setting."""
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
        BanditConfig(**settings)


def test_a_diverging_loss_stops(bandit_log):
    """A loss that is not finite raises instead of writing NaN weights."""
    learner, _ = trained(bandit_log(50).batch())
    batch = bandit_log(50).batch()
    batch["rewards"] = np.full(50, 1e308)
    with pytest.raises(FloatingPointError, match="the loss became"):
        Bandit(learner.policy, BanditConfig(baseline=-1e308)).update(
            batch, np.random.default_rng(0)
        )
