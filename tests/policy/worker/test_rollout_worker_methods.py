"""A worker's methods: the order of sampling, weights, gradients, learning, metrics, the rest."""

from __future__ import annotations

import gc
import socket

import numpy as np
import pytest

from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig
from policy.algorithms.trainable_policy import TrainablePolicy
from policy.inference.filters import MeanStdFilter
from policy.networks.policy import Policy
from policy.sampling.callbacks import Callbacks
from policy.sampling.metrics import RolloutMetrics
from policy.worker.rollout_worker import RolloutWorker, standardised
from storage.experience.interfaces import EndOfInput, InputReader, OutputWriter
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch, concat_samples
from tests.policy.toy_envs import CountEnv


def worker(**arguments):
    defaults = {"env_creator": CountEnv, "rollout_fragment_length": 8, "seed": 1}
    return RolloutWorker(**defaults | arguments)


# --- sampling --------------------------------------------------------------------------------


class Order(Callbacks, OutputWriter):
    """Records who saw a sample, and its observations at that time."""

    def __init__(self):
        self.seen = []

    def on_sample_end(self, *, worker, samples):
        self.seen.append(("callback", samples["obs"].dtype))
        samples["rewards"][:] = 5

    def write(self, batch):
        self.seen.append(("output", batch["obs"].dtype))
        assert (batch["rewards"] == 5).all()


def test_a_sample_may_have_other_steps_and_its_source_is_public():
    """As in RLlib: `num_timesteps` at least, for this call alone, also over several fragments."""
    sampler = worker(num_envs=1)
    sizes = [sampler.sample(num_timesteps=20).count, sampler.sample().count]
    assert sizes == [24, 8]
    assert sampler.input_reader.next().count == 8
    with pytest.raises(ValueError, match="num_timesteps: expected 1 or more, got 0"):
        sampler.sample(num_timesteps=0)


class Pieces(InputReader):
    """Returns the same rows, three at a time, and ends."""

    def __init__(self, source, pieces):
        self.rows, self.left = source, pieces

    def next(self, timeout=None):
        if not self.left:
            raise EndOfInput("no more")
        self.left -= 1
        return self.rows.slice(0, 3).copy()


def test_a_sample_passes_its_stations_in_order():
    """The input's batches are joined, then the callback, the output and the estimators see them;
    compression comes last.

    Row: sample()
    """
    order = Order()
    with worker(
        callbacks=order,
        output_creator=lambda ioctx: order,
        input_evaluation=["is"],
        compress_observations=True,
        env_config={"length": 3},
    ) as made:
        batch = made.sample()
        assert order.seen == [("callback", np.float32), ("output", np.float32)]
        assert batch["obs"].dtype != np.float32
        [estimate] = [one for one in made.get_metrics() if not isinstance(one, RolloutMetrics)]
        # two whole episodes, with rewards set by the callback
        assert (estimate.metrics["n"], estimate.metrics["v_old"]) == (2, 5 * (1 + 0.99 + 0.99**2))


def test_a_sample_of_an_input_takes_what_the_batch_mode_says():
    """truncate_episodes: at most num_envs batches; complete_episodes: until the target is reached.
    An input that ends returns the rest, then raises.

    Row: sample()
    """
    rows = worker().sample()
    reader = {"input_creator": lambda ioctx: Pieces(rows, 9)}
    with worker(**reader) as made:
        assert made.sample().count == 3
    with worker(**reader, batch_mode="complete_episodes") as made:
        assert [made.sample().count for _ in range(3)] == [9, 9, 9]
        with pytest.raises(EndOfInput, match="no more"):
            made.sample()


def test_the_count_comes_with_the_batch():
    """Row: sample_with_count()"""
    with worker() as made:
        batch, count = made.sample_with_count()
        assert (count, batch.count) == (8, 8)


def test_a_worker_is_an_endless_iterator_or_ends_with_its_input():
    """Row: iterator base (ParallelIteratorWorker)"""
    with worker() as made:
        for number, batch in enumerate(made):
            assert batch.count == 8
            if number == 2:
                break
    rows = worker().sample()
    with worker(input_creator=lambda ioctx: Pieces(rows, 2)) as made:
        assert len(list(made)) == 2


# --- weights and global variables ------------------------------------------------------------


def test_weights_are_copies_and_an_unknown_policy_is_an_error():
    """Learning does not change the result of get_weights. set_weights copies too, records the
    version on later steps and sets global variables.

    Row: get_weights(policies=None) / set_weights(weights, global_vars=None)
    """
    with worker() as made:
        before = made.get_weights()
        kept = {name: array.copy() for name, array in before["default"].items()}
        made.learn_on_batch(made.sample())
        assert same(before["default"], kept)
        assert not same(made.get_weights()["default"], kept)
        made.set_weights(before, {"timestep": 7}, version=4)
        assert same(made.get_weights(["default"])["default"], kept)
        before["default"]["pi.0.bias"][:] = 9
        assert same(made.get_weights()["default"], kept)
        assert (made.get_global_vars(), set(made.sample()["policy_version"])) == (
            {"timestep": 7},
            {4},
        )
        for wrong in (lambda: made.get_weights(["x"]), lambda: made.set_weights({"x": {}})):
            with pytest.raises(KeyError, match="no policy 'x'"):
                wrong()


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_global_variables_reach_every_policy_and_its_schedule():
    """timestep is the position in the learning-rate schedule.

    Row: set_global_vars / get_global_vars
    """
    config = {"algorithm": PPOConfig(lr=1e-3, schedule_steps=100)}
    with worker(policy_config=config) as made:
        given = {"timestep": 50, "other": 1}
        made.set_global_vars(given)
        given["timestep"] = 0
        policy = made.get_policy()
        assert policy.global_vars == {"timestep": 50, "other": 1}
        assert policy.algorithm.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
        assert made.get_global_vars() == {"timestep": 50, "other": 1}
        made.learn_on_batch(made.sample())
        assert policy.algorithm.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


# --- gradients -------------------------------------------------------------------------------


def test_gradients_are_copies_with_their_count():
    """A later backward pass does not change the gradients that were returned.

    Row: compute_gradients(samples)
    """
    with worker() as made:
        batch = made.sample()
        gradients, info = made.compute_gradients(batch)
        kept = [one.copy() for one in gradients]
        assert (info["batch_count"], "loss" in info["learner_stats"]) == (8, True)
        made.compute_gradients(made.sample())
        assert all(map(np.array_equal, gradients, kept))
        with pytest.raises(ValueError, match="expected rows to learn from, got none of 0"):
            made.compute_gradients(batch.slice(0, 0))


def test_applying_computed_gradients_is_learning():
    """compute + apply changes weights as learn_on_batch does; a wrong number or shape is refused
    and changes nothing.

    Row: apply_gradients(grads)
    """
    one, other = worker(), worker()
    batch = one.sample()
    gradients, _ = one.compute_gradients(batch)
    one.apply_gradients({"default": gradients})
    other.learn_on_batch(batch)
    assert same(one.get_weights()["default"], other.get_weights()["default"])
    one.apply_gradients(gradients)
    before = one.get_weights()["default"]
    for wrong, text in ((gradients[:-1], "one a parameter"), (gradients[::-1], "expected shape")):
        with pytest.raises(ValueError, match=text):
            one.apply_gradients(wrong)
    with pytest.raises(KeyError, match="no policy 'x'"):
        one.apply_gradients({"default": gradients, "x": gradients})
    assert same(one.get_weights()["default"], before)


@pytest.mark.parametrize(
    ("columns", "left_out"), [({"advantages": 1e200}, 1), ({"action_logp": -1e6}, 8)]
)
def test_rows_whose_loss_is_not_finite_are_left_out_by_name(columns, left_out):
    """A number beyond float32 excludes only its row. Any other non-finite loss excludes the batch,
    and the policy does not change.

    Row: learn_on_batch(samples)
    """
    with worker() as made:
        batch, before = made.sample(), made.get_weights()["default"]
        batch["advantages"][:] = -1.0
        for name, value in columns.items():
            batch[name][2] = value
        info = made.learn_on_batch(batch)
        assert info["left_out"] == {"not_finite": left_out}
        assert same(before, made.get_weights()["default"]) == (left_out == 8)
        usual = made.learn_on_batch(made.sample())
        assert info["learner_stats"].keys() == usual["learner_stats"].keys()


def test_learning_on_a_batch_tells_what_happened():
    """Learning on a batch is one gradient step; the info has the loss and the number of rows.

    Row: learn_on_batch(samples)
    """
    with worker() as made:
        info = made.learn_on_batch(made.sample())
        assert info["batch_count"] == 8
        assert np.isfinite(info["learner_stats"]["loss"])


def test_epochs_over_a_sample():
    """Fields are standardised once, in a copy. Minibatches cover the sample, and the last may be
    short; the statistics are those of the last epoch. A size other than expected is refused.

    Row: sample_and_learn(expected_batch_size, num_sgd_iter, sgd_minibatch_size, standardize_fields)
    """
    seen = []

    class Watching(TrainablePolicy):
        def learn_on_batch(self, batch):
            seen.append(batch)
            return {"learner_stats": {"number": float(len(seen))}}

    with worker(policy=Watching) as made:
        stats, count = made.sample_and_learn(8, 2, 3, ["advantages"])
        assert count == 8
        assert sorted(one.count for one in seen[:3]) == [2, 3, 3]
        assert stats == {"number": 5.0}  # the mean of 4, 5 and 6
        advantages = np.concatenate([one["advantages"] for one in seen[:3]])
        assert advantages.mean() == pytest.approx(0, abs=1e-9)
        assert advantages.std() == pytest.approx(1)
        assert identities(seen[:3]) == identities(seen[3:])
        for size in (0, None):
            seen.clear()
            made.sample_and_learn(8, 1, size, [])
            assert [one.count for one in seen] == [8]
        with pytest.raises(ValueError, match="expected a batch of 9 steps, got 8"):
            made.sample_and_learn(9, 1, 4, [])
        with pytest.raises(ValueError, match="num_sgd_iter"):
            made.sample_and_learn(8, 0, 4, [])


def identities(batches):
    rows = concat_samples(batches)
    return sorted(zip(rows["eps_id"], rows["t"], strict=True))


def test_standardising_leaves_the_batch_and_bounds_the_divisor():
    """(x - mean) / max(1e-4, std)."""
    batch = SampleBatch(x=np.array([1.0, 3.0]), y=np.array([2.0, 2.0]))
    done = standardised(batch, ["x", "y"])
    assert (done["x"].tolist(), done["y"].tolist()) == ([-1, 1], [0, 0])
    assert batch["x"].tolist() == [1, 3]


def test_a_workers_batches_teach_a_learner_too():
    """policy.algorithms.learner accepts them unchanged: they have every column that it needs."""
    with worker(rollout_fragment_length=64) as made:
        policy = made.get_policy()
        learner = Learner(Policy(policy.spec, seed=1), policy.settings.algorithm)
        metrics = learner.update(made.sample())
        assert metrics["rows"] == 64


def test_learning_by_the_worker_solves_a_small_problem():
    """Action 1 earns, action 0 does not: after some updates the policy nearly always takes 1."""

    class Choice(CountEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return (obs, float(action), *rest)

    with worker(env_creator=Choice, num_envs=4, rollout_fragment_length=32) as made:
        for _ in range(15):
            made.sample_and_learn(128, 4, 64, ["advantages"])
        made.get_metrics()
        made.sample()
        returns = [one.reward for one in made.get_metrics()]
        assert np.mean(returns) > 4.5


# --- metrics and filters ---------------------------------------------------------------------


def test_metrics_are_drained():
    """Episodes that ended since the last call, with lengths, returns and agents' rewards.

    Row: get_metrics()
    """
    with worker(env_config={"length": 4}) as made:
        made.sample()
        metrics = made.get_metrics()
        assert [(one.length, one.reward) for one in metrics] == [(4, 10.0), (4, 10.0)]
        assert metrics[0].agent_rewards == {("agent0", "default"): 10.0}
        assert set(metrics[0].perf_stats) == {"inference_ms", "env_wait_ms"}
        assert made.get_metrics() == []


def test_filters_of_workers_merge_into_one_over_all_data():
    """After several rounds of flushing and syncing, N workers have the statistics of one filter
    over all observations (1e-9); nothing is counted twice.

    Row: sync_filters(new) / get_filters(flush_after)
    """
    settings = {"observation_filter": "MeanStdFilter"}
    driver = worker(**settings)
    workers = [worker(**settings, env_config={"length": n}) for n in (3, 5, 7)]
    seen = []
    for _ in range(3):
        for one in workers:
            one.sync_filters(driver.get_filters())
        for one in workers:
            seen.append(one.sample()["obs"])
            taken = one.get_filters(flush_after=True)["default"]
            assert type(taken) is MeanStdFilter
            assert one.filters["default"].buffer.n == 0
            driver.filters["default"].apply_changes(taken)
    data = np.concatenate(seen).astype(np.float64)
    stats = driver.filters["default"].stats
    assert stats.n == len(data)
    np.testing.assert_allclose(stats.mean, data.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(stats.var, data.var(axis=0, ddof=1), rtol=1e-9)


def test_filters_are_copied_whole_and_have_to_be_all_there():
    """sync takes statistics and buffer; get returns copies, and without flushing keeps the buffer.

    Row: sync_filters(new) / get_filters(flush_after)
    """
    made = worker(observation_filter="MeanStdFilter")
    made.sample()
    taken = made.get_filters()
    taken["default"].push([[100.0]])
    assert (made.filters["default"].stats.n, made.filters["default"].buffer.n) == (8, 8)
    made.sync_filters(taken)
    assert (made.filters["default"].stats.n, made.filters["default"].buffer.n) == (9, 9)
    with pytest.raises(ValueError, match="missing"):
        made.sync_filters({})
    with pytest.raises(ValueError, match="expected a MeanStdFilter"):
        made.sync_filters(worker().get_filters())


# --- environments, policies, the rest --------------------------------------------------------


def test_functions_of_every_env_and_policy():
    """In the order of copies and ids; an unknown policy is None, or an error where one is needed.

    Row: foreach_env, get_policy (None if unknown), for_policy, foreach_policy(func(policy, pid)),
    foreach_trainable_policy
    """
    with worker(num_envs=3) as made:
        assert made.foreach_env(lambda env: env.length) == [5, 5, 5]
        assert made.get_policy() is made.policies["default"]
        assert made.get_policy("x") is None
        assert made.for_policy(lambda policy: policy.version) == -1
        with pytest.raises(KeyError, match="no policy 'x'"):
            made.for_policy(id, "x")
        assert made.foreach_policy(lambda policy, name: name) == ["default"]
        assert made.foreach_trainable_policy(lambda policy, name: name) == ["default"]
        assert made.get_spaces() == {"default": (CountEnv.observation_space, CountEnv.action_space)}


def test_stopping_closes_everything_once():
    """Environments, input and output are closed. A second stop, the end of a context and the last
    reference going away do the same; a stopped worker does not sample.

    Row: stop(), __del__
    """
    envs = []

    class Closing(OutputWriter):
        closed = 0

        def write(self, batch):
            pass

        def close(self):
            self.closed += 1

    output = Closing()
    config = {"made": envs}
    with worker(output_creator=lambda ioctx: output, env_config=config, num_envs=2) as made:
        made.sample()
    made.stop()
    assert ([env.closed for env in envs], output.closed) == ([True, True], 1)
    with pytest.raises(RuntimeError, match="stopped"):
        made.sample()
    made = worker(env_config=config)
    del made
    gc.collect()
    assert envs[-1].closed
    with pytest.raises(ValueError, match="num_envs"):
        worker(num_envs=0)
    empty = RolloutWorker(
        policy={"default": (None, CountEnv.observation_space, CountEnv.action_space, {})}
    )
    with pytest.raises(RuntimeError, match="neither an env_creator nor an input_creator"):
        empty.sample()


def test_creation_args_make_the_same_worker():
    """Row: creation_args()"""
    made = worker(num_envs=2)
    args = made.creation_args()
    assert args == {"env_creator": CountEnv, "rollout_fragment_length": 8, "seed": 1, "num_envs": 2}
    twin = RolloutWorker(**args)
    assert (twin.sample()["actions"] == made.sample()["actions"]).all()


def test_addresses_and_ports():
    """The address is IPv4; the port can be bound.

    Row: get_node_ip(), find_free_port()
    """
    made = worker()
    socket.inet_aton(made.get_node_ip())
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", made.find_free_port()))


# --- batches ---------------------------------------------------------------------------------


def test_interleaved_fragments_are_put_together_again():
    """The rows of interleaved fragments are split by episode, in the order of t.

    Row: split_by_episode
    """
    with worker(num_envs=2, rollout_fragment_length=3) as made:
        batch = concat_samples([made.sample() for _ in range(3)])
    assert [one["t"].tolist() for one in batch.split_by_episode()] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_batch_operations_keep_dtypes():
    """Joined, shuffled, sliced, copied and compressed batches keep their rows; rewards stay
    float64.

    Row: concat_samples / shuffle / slice / rows / columns / copy / compress
    """
    with worker() as made:
        one, other = made.sample(), made.sample()
    both = concat_samples([one, other])
    assert (both.count, both["rewards"].dtype) == (16, np.float64)
    assert both.slice(8, None) == other
    assert sorted(both.shuffle()["rewards"]) == sorted(both["rewards"])
    assert [row["t"] for row in one.rows()] == one.columns(["t"])[0].tolist()
    copied = both.copy()
    copied["rewards"][:] = 0
    assert both["rewards"].any()
    copied.compress()
    assert np.array_equal(copied.decompress_if_needed()["obs"], both["obs"])


def test_a_multi_agent_batch_counts_env_steps_and_in_total_agent_steps():
    """`count` is of the environment, `total` of all agents; a lone default policy is unwrapped.

    Row: concat_samples / shuffle / slice / rows / columns / copy / compress
    """
    with worker() as made:
        rows = made.sample()
    both = MultiAgentBatch({"a": rows, "b": rows[:3]}, env_steps=8)
    assert (both.count, both.total, both.agent_steps()) == (8, 11, 11)
    twice = MultiAgentBatch.concat_samples([both, both])
    assert (twice.count, twice.total) == (16, 22)
    assert MultiAgentBatch.wrap_as_needed({"default": rows}, 8) is rows


@pytest.mark.parametrize("context", [{"length": 3}, {"length": 3, "truncated": True}])
def test_advantages_are_those_of_each_fragment(context):
    """A sample has what the algorithm computes from its rows alone: no value crosses an end, a
    terminated row does not bootstrap, every other last row does from its own next observation."""
    with worker(env_config=context, num_envs=2, rollout_fragment_length=7) as made:
        batch = made.sample()
        bare = batch.select([name for name in batch if name not in ("advantages", "value_targets")])
        found = made.get_policy().algorithm.advantages(bare)
        np.testing.assert_allclose(batch["advantages"], found.advantages, atol=1e-6)
        np.testing.assert_allclose(batch["value_targets"], found.value_targets, atol=1e-6)
        last = batch["terminateds"].nonzero()[0]
        rewards = batch["rewards"][last]
        np.testing.assert_allclose(batch["value_targets"][last], rewards, atol=1e-6)
