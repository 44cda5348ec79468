"""PPO uses the stored log probability, bootstraps as specified, and learns.

Also of `policy.algorithms.base`.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.ppo_cartpole import CartPoles, learn
from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig, _effective_share
from policy.algorithms.trainable_policy import TrainablePolicy
from policy.inference.action_rule import ActionRule
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.experience.sample_batch import SampleBatch, concat_samples
from storage.spaces.descriptors import Box, Discrete

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())
SPEC = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(hidden=(16,)))


def new_learner(config=None, seed=0, spec=SPEC):
    return Learner(Policy(spec, seed=seed), config or PPOConfig(epochs=2, minibatch=64), seed=seed)


@pytest.fixture(scope="module")
def played():
    """256 rows of CartPole, acted by the policy that is trained."""
    return CartPoles(8, 5).play(Policy(SPEC, seed=5).to_numpy(version=1), 32)


def changed(batch, **columns):
    return SampleBatch({**batch, **columns})


def pi(learner):
    return {k: v for k, v in learner.policy.get_weights().items() if k.startswith("pi")}


def same(one, two):
    return all(np.array_equal(a, two[name]) for name, a in one.items())


def decided(learner, batch):
    """One-step decisions, half of which earned, so that the sign of every advantage is known."""
    rewards = np.where(np.arange(batch.count) % 2 == 0, 10.0, -10.0)
    over = np.ones(batch.count, np.bool_)
    fresh = learner.policy.logp(learner.policy.flat_observations(batch), {"": batch["actions"]})
    return changed(batch, rewards=rewards, terminateds=over, action_logp=fresh)


def test_the_stored_log_probability_is_the_denominator(played):
    """If every ratio is already beyond the clip, on the side of its advantage, `pi` is unchanged.

    An update that recomputed log mu would see ratios of 1, and change it.
    """
    config = PPOConfig(epochs=1)
    stale, fresh, before = (new_learner(config) for _ in range(3))
    batch = decided(fresh, played)
    beyond = batch["action_logp"] - np.sign(batch["rewards"])
    metrics = stale.update(changed(batch, action_logp=beyond))
    assert same(pi(stale), pi(before))
    assert metrics["clip_fraction"] == 1.0
    fresh.update(batch)
    assert not same(pi(fresh), pi(before))


def test_age_shows_in_the_effective_sample_size(played):
    """1 for rows of the current policy; less, the more the stored behaviour policy differs."""
    batch = decided(new_learner(), played)
    old = changed(batch, action_logp=batch["action_logp"] - np.linspace(0, 3, batch.count))
    assert new_learner().update(batch)["ess"] == pytest.approx(1.0, abs=1e-9)
    metrics = new_learner().update(old)
    assert metrics["ess"] < 0.7
    assert metrics["stale_kl"] > 0.5
    case = GOLDEN["ppo_clip"]
    ratio = torch.tensor(case["p_new"]).double() / torch.tensor(case["p_old"]).double()
    assert _effective_share(ratio.log() + 800) == pytest.approx(case["ess_over_n"], abs=1e-6)


def test_rows_that_say_nothing_of_the_policy_are_left_out(played):
    """Logged by other policies, without a log probability, without an end or a next observation."""
    source, logp = played["source"].copy(), played["action_logp"].copy()
    has_next, over = played["has_new_obs"].copy(), played["terminateds"].copy()
    source[:3] = ["logged", "replayed", "logged"]
    logp[3:5] = np.nan
    has_next[5:8], over[5:8] = False, [False, False, True]
    learner = new_learner()
    learner.update(
        changed(played, source=source, action_logp=logp, has_new_obs=has_next, terminateds=over)
    )
    assert learner.counts.excluded == {"not_on_policy": 3, "no_logp": 2, "no_next_obs": 2}
    assert learner.counts.rows_trained == played.count - 7


def one_episode(learner, count=3):
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(count + 1, 4)).astype(np.float32)
    zeros, no = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    return SampleBatch(
        obs=obs[:-1], new_obs=obs[1:], actions=zeros, rewards=np.ones(count), t=np.arange(count),
        terminateds=no, truncateds=no, has_new_obs=~no, action_logp=np.full(count, -0.7),
        source=["on_policy"] * count, agent_id=["a"] * count, stream=["s"] * count,
        ordinal=zeros, episode_ordinal=zeros, policy_version=zeros,
    )  # fmt: skip


@pytest.mark.parametrize("last", ["truncated", "cut", "left_out", "terminated"])
def test_what_a_fragments_last_row_bootstraps_from(last):
    """V of its next observation, even if the row itself is left out; nothing at the end."""
    learner = new_learner(PPOConfig(gamma=0.9, lam=0.8))
    batch = one_episode(learner)
    if last == "truncated":
        batch["truncateds"] = np.arange(3) == 2
    elif last == "terminated":
        batch["terminateds"] = np.arange(3) == 2
    elif last == "left_out":
        batch["has_new_obs"] = np.arange(3) < 2
    values = learner.policy.values(learner.policy.observe(batch["obs"])).tolist()
    after = learner.policy.values(learner.policy.observe(batch["new_obs"])).tolist()
    if last == "terminated":
        after[2] = 0.0
    used, _ = learner.usable(batch)
    rows, _ = learner.algorithm.rows(used)
    expected, carried = [], 0.0
    for t in reversed(range(used.count)):
        carried = 1.0 + 0.9 * after[t] - values[t] + 0.72 * carried
        expected.append(carried)
    assert used.count == (2 if last == "left_out" else 3)
    np.testing.assert_allclose(rows.advantages, expected[::-1], atol=1e-6)


def test_an_episode_carries_nothing_into_another():
    """This includes an episode whose t continues another's, as with parts of long episodes."""
    learner = new_learner()
    first = one_episode(learner)
    second = changed(first, t=first["t"] + 3, episode_ordinal=first["episode_ordinal"] + 1)
    alone, _ = learner.algorithm.rows(first)
    together, _ = learner.algorithm.rows(concat_samples([first, second]))
    np.testing.assert_allclose(together.advantages, np.tile(alone.advantages, 2), atol=1e-6)


@pytest.mark.parametrize("gap", [slice(1, 2), slice(2, 5), slice(3, 4)])
@pytest.mark.parametrize("learns", ["learner", "worker"])
def test_nothing_is_carried_across_a_gap_in_t(gap, learns):
    """Rows in the middle of an episode are missing, as from a damaged shard. Those before and after
    them are two fragments: as if each was alone, for a learner and for a worker's policy."""
    whole = one_episode(new_learner(), count=6)
    index = np.arange(6)
    before, after = whole.take(index < gap.start), whole.take(index >= gap.stop)
    rest = concat_samples([before, after])

    def estimates(batch):
        if learns == "worker":
            policy = TrainablePolicy(SPEC.observation, SPEC.action, {"spec": SPEC})
            done = policy.postprocess_trajectory(batch.copy())
            return np.stack([done["advantages"], done["value_targets"]])
        rows, _ = new_learner().algorithm.rows(batch)
        return np.stack([rows.advantages.numpy(), rows.value_targets.numpy()])

    apart = np.concatenate([estimates(before), estimates(after)], axis=1)
    np.testing.assert_allclose(estimates(rest), apart, atol=1e-6)
    assert not np.allclose(estimates(whole)[0, : before.count], apart[0, : before.count], atol=1e-3)


def test_the_order_of_rows_means_nothing(played):
    """An episode's rows are sorted by t, whatever order the reader returned."""
    one, two = new_learner(), new_learner()
    one.update(played)
    two.update(played.shuffle(np.random.default_rng(1)))
    assert same(one.policy.get_weights(), two.policy.get_weights())


def test_schedules_fall_in_a_line_and_stay_at_their_end(played):
    """Schedules fall towards 0 with the rows trained on, but not below `schedule_end` times the
    first value.
    """
    learner = new_learner(PPOConfig(epochs=1, schedule_steps=1024, schedule_end=0.5))
    found = [learner.update(played)["lr"] for _ in range(4)]
    assert found == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.5e-3])
    constant = new_learner(PPOConfig(epochs=1, schedule_steps=None))
    assert {constant.update(played)["clip"] for _ in range(3)} == {0.2}


@pytest.mark.parametrize(
    "settings",
    [{"gamma": 1.1}, {"lam": -0.1}, {"epochs": 0}, {"lr": 0.0}, {"clip": float("nan")},
     {"value_coeff": -1.0}, {"schedule_steps": 0}, {"max_grad_norm": float("inf")}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    """The error names the setting."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        PPOConfig(**settings)


def test_a_policy_without_a_value_head_is_refused():
    """Advantages need a value function."""
    spec = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(value_head=False))
    with pytest.raises(ValueError, match="value head"):
        new_learner(spec=spec)


def test_a_policy_that_acts_otherwise_than_it_learns_is_refused():
    """The ratio's pi is sampling at temperature 1, never an action rule."""
    spec = replace(SPEC, action_rule=ActionRule("epsilon_greedy"))
    with pytest.raises(ValueError, match=r"expected the action rule sample:1\.0, .*got epsilon_"):
        new_learner(spec=spec)


@pytest.mark.parametrize(
    ("returns", "steps"), [(100, 10_000), pytest.param(195, 20_000, marks=pytest.mark.long)]
)
def test_it_learns_cartpole(returns, steps):
    """The return starts at about 20; with a wrong sign it stays there. 195 counts as solved."""
    assert any(point.mean_return >= returns for point in learn(1, steps))


def test_scaled_rewards_suit_any_unit(played):
    """Rewards in cents change nothing, but for rounding; without the setting they do."""
    cents = changed(played, rewards=played["rewards"] * 100)
    for scaled in (True, False):
        config = PPOConfig(epochs=2, minibatch=64, scale_rewards=scaled)
        one, other = new_learner(config), new_learner(config)
        one.update(played)
        other.update(cents)
        pairs = zip(pi(one).values(), pi(other).values(), strict=True)
        assert all(np.allclose(a, b, atol=1e-5) for a, b in pairs) is scaled


def test_the_scale_of_rewards_stands_in_the_checkpoint_and_is_optional_there(played):
    """A checkpoint of an earlier release has none, and is gone on from."""
    config = PPOConfig(epochs=1, scale_rewards=True)
    learner, other = new_learner(config), new_learner(config)
    learner.update(played)
    state = json.loads(json.dumps(learner.algorithm.state_dict()))
    other.algorithm.load_state_dict(state)
    assert other.algorithm._scale() == learner.algorithm._scale() != 1.0
    other.algorithm.load_state_dict({"trained": state["trained"]})
    assert (other.algorithm.trained, other.algorithm._scale()) == (256, 1.0)
