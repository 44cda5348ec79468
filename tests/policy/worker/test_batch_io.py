"""A worker's input, its output and the evaluation of its input.

Also of `policy.worker.input_evaluation`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import pytest

from policy.inference.spec import PolicySpec
from policy.ope.estimators import ESTIMATORS
from policy.sampling.metrics import OffPolicyEstimate, RolloutMetrics
from policy.worker.batch_io import IOContext, NoopOutput
from policy.worker.rollout_worker import RolloutWorker
from storage.experience.conformance import InputReaderConformance
from storage.experience.interfaces import EndOfInput, InputReader
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch, concat_samples
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from storage.shards.output_writer import ParquetOutputWriter
from storage.spaces.descriptors import Box, Discrete
from tests.policy.judging.test_evaluate_verdicts import log_episodes
from tests.policy.toy_envs import AgentsEnv, CountEnv


def worker(**arguments):
    defaults = {"env_creator": CountEnv, "rollout_fragment_length": 8, "seed": 1}
    return RolloutWorker(**defaults | arguments)


class Given(InputReader):
    """Returns the given batches."""

    def __init__(self, batches):
        self.batches = list(batches)

    def next(self, timeout=None):
        if not self.batches:
            raise EndOfInput("no more")
        return self.batches.pop(0)


class TestOwnSampler(InputReaderConformance):
    """A worker's own sampler as an input."""

    ends = False
    arguments: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _workers(self):
        with ExitStack() as self.stack:
            yield

    def reader(self):
        readers = []

        def kept(ioctx):
            readers.append(ioctx.default_sampler_input())
            return readers[0]

        self.stack.enter_context(worker(input_creator=kept, **self.arguments))
        return readers[0]


class TestOwnSamplerOfAgents(TestOwnSampler):
    arguments: ClassVar[dict[str, Any]] = {"env_creator": AgentsEnv}


class TestThread(TestOwnSampler):
    arguments: ClassVar[dict[str, Any]] = {"sample_async": True}


class TestFake(TestOwnSampler):
    arguments: ClassVar[dict[str, Any]] = {"fake_sampler": True}


# --- creators --------------------------------------------------------------------------------


def test_creators_get_a_context_and_give_readers_and_writers(tmp_path):
    """The context has the log's directory (the working directory by default), the config, the
    worker and its index, and the default input. A result that is not a reader or writer is refused.

    Row: input_creator(ioctx) / output_creator(ioctx)
    """
    seen = []

    def given(ioctx):
        seen.append(ioctx)
        return ioctx.default_sampler_input()

    with worker(
        input_creator=given, worker_index=3, policy_config={"gamma": 0.5}, log_dir=str(tmp_path)
    ) as made:
        assert made.sample().count == 8
        [context] = seen
        assert (context.worker_index, context.worker, context.config) == (3, made, {"gamma": 0.5})
        assert context.log_dir == str(tmp_path)
    for name, text in (("input_creator", "InputReader"), ("output_creator", "OutputWriter")):
        with pytest.raises(TypeError, match=f"{name}: expected an {text}, got int"):
            worker(**{name: lambda ioctx: 3})
    with pytest.raises(ValueError, match="no environment to sample from"):
        IOContext().default_sampler_input()
    NoopOutput().write(SampleBatch())


@pytest.mark.parametrize(
    "arguments", [{}, {"clip_rewards": 2.0}, {"batch_mode": "complete_episodes"}]
)
def test_shards_that_a_worker_writes_are_read_as_its_input(tmp_path, arguments):
    """Another worker reads the samples from the shards row by row, like any other log.

    Row: input_creator(ioctx) / output_creator(ioctx)
    """

    def to_shards(ioctx):
        return ParquetOutputWriter(tmp_path, ioctx.worker.descriptors())

    with worker(output_creator=to_shards, num_envs=2, **arguments) as made:
        played = [made.sample() for _ in range(3)]
    rows = concat_samples(played)

    def from_shards(ioctx):
        return ShardReader(ioctx.log_dir, policy_id="default", batch_size=1000)

    with worker(input_creator=from_shards, log_dir=str(tmp_path)) as made:
        back = made.sample()
        with pytest.raises(EndOfInput, match="every shard"):
            made.sample()
    assert back.count == rows.count
    mine = {(row["eps_id"], row["t"]): row for row in rows.rows()}
    for row in back.rows():
        written = mine[row["eps_id"], row["t"]]
        for name in ("obs", "new_obs", "actions", "action_logp", "policy_version", "terminateds"):
            np.testing.assert_array_equal(row[name], written[name])
        assert row["rewards"] == row["t"] + 1  # raw, without the changes for learning


@pytest.mark.parametrize(
    "arguments",
    [{"batch_mode": "complete_episodes"}, {"rollout_fragment_length": 12}, {"num_envs": 2}],
)
def test_episodes_of_several_agents_that_a_worker_writes_are_joined_again(tmp_path, arguments):
    """Late and early agents, whole episodes or fragments: the same rows at the same steps of the
    environment, and equal counts of both; each policy's rows can also be read by its id.

    Row: input_creator(ioctx) / output_creator(ioctx)
    """

    def to_shards(ioctx):
        return ParquetOutputWriter(tmp_path, ioctx.worker.descriptors())

    by_agent = {"a": "left", "b": "right"}
    made = worker(
        env_creator=AgentsEnv,
        policy={"left": None, "right": None},
        policy_mapping_fn=by_agent.get,
        output_creator=to_shards,
        **{"rollout_fragment_length": 4} | arguments,
    )
    with made:
        played = MultiAgentBatch.concat_samples([made.sample() for _ in range(6)])
    with MultiAgentReader(tmp_path, batch_size=1000) as reader:
        [back] = reader
        assert reader.stats.partial == {}
    assert (back.env_steps(), back.agent_steps()) == (played.env_steps(), played.agent_steps())
    names = ("eps_id", "agent_id", "t", "env_t", "obs", "new_obs", "actions", "rewards")
    names += ("terminateds", "truncateds", "action_logp")
    for name, mine in played.policy_batches.items():
        assert in_order(back[name], names) == in_order(mine, names)
        with ShardReader(tmp_path, policy_id=name, batch_size=1000) as reader:
            assert in_order(reader.next(), names[:3]) == in_order(mine, names[:3])
    assert [one.count for one in back.timeslices(1)] == [1] * back.count


def in_order(batch, names):
    return sorted(tuple(np.ravel(row[n]).tolist() for n in names) for row in batch.rows())


# --- evaluation ------------------------------------------------------------------------------


def estimates(made):
    return [one for one in made.get_metrics() if isinstance(one, OffPolicyEstimate)]


def test_whole_episodes_are_judged_not_fragments():
    """Fragments wait, over several samples, until their episode is whole: a policy evaluated on its
    own episodes has their mean discounted return.

    Row: input_evaluation: is / wis / simulation
    """
    with worker(
        rollout_fragment_length=3,
        input_evaluation=["is", "wis", "pdis", "wis_pd", "dr", "dm"],
        policy_config={"gamma": 0.9},
    ) as made:
        made.sample()
        for one in estimates(made):
            assert "no complete episode" in one.metrics["unavailable"]
        made.sample()
        found = {one.estimator_name: one.metrics for one in estimates(made)}
        value = sum(0.9**t * (t + 1) for t in range(5))
        for name in ("is", "wis", "pdis", "wis_pd"):
            assert found[name]["value"] == pytest.approx(value, rel=1e-5)
            assert (found[name]["n"], found[name]["v_old"]) == (1, pytest.approx(value))
            assert found[name]["v_gain"] == pytest.approx(1, rel=1e-5)
        for name in ("dr", "dm"):
            assert "2 or more episodes" in found[name]["unavailable"]
        assert estimates(made) == []


def test_every_estimator_may_judge_the_input():
    """Each estimator, given by name, can judge an input of one-step episodes.

    Row: input_evaluation: is / wis / simulation
    """
    with worker(
        env_config={"length": 1}, rollout_fragment_length=64, input_evaluation=list(ESTIMATORS)
    ) as made:
        made.sample()
        for one in estimates(made):
            assert one.metrics["value"] == pytest.approx(1.0, rel=1e-3)
            assert one.metrics["n"] == 64


def test_what_cannot_be_judged_is_refused():
    """An unknown method, several policies, an input whose rows have no propensity.

    Row: input_evaluation: is / wis / simulation
    """
    with pytest.raises(ValueError, match="Unknown evaluation method: best"):
        worker(input_evaluation=["best"])
    with pytest.raises(ValueError, match="expected a list of names"):
        worker(input_evaluation="is")
    with pytest.raises(NotImplementedError, match="single policy"):
        worker(
            env_creator=AgentsEnv,
            policy={"a": None, "b": None},
            policy_mapping_fn=lambda agent: agent,
            input_evaluation=["is"],
        )
    rows = worker().sample()
    del rows["action_logp"]
    with (
        worker(input_evaluation=["is"], input_creator=lambda ioctx: Given([rows])) as made,
        pytest.raises(ValueError, match="log actions with action_prob="),
    ):
        made.sample()
    both = MultiAgentBatch({"a": worker().sample()}, 8)
    with (
        worker(input_evaluation=["is"], input_creator=lambda ioctx: Given([both])) as made,
        pytest.raises(NotImplementedError, match="MultiAgentBatch"),
    ):
        made.sample()


def test_an_episode_without_its_beginning_is_given_up():
    """An episode without its beginning is counted and not evaluated."""
    rows = worker(rollout_fragment_length=10).sample()
    given = [rows.slice(2, 10)]
    with worker(input_evaluation=["is"], input_creator=lambda ioctx: Given(given)) as made:
        made.sample()
        [one] = estimates(made)
        assert (one.metrics["n"], one.metrics["given_up"]) == (1, 1)


@pytest.mark.parametrize(
    "ends", [{"no_done_at_end": True}, {"soft_horizon": True, "episode_horizon": 4}]
)
def test_an_end_that_is_not_recorded_as_done_is_an_end(ends):
    """Episodes that a soft horizon cuts, or that end without a flag, are whole: all of them are
    evaluated, not only those that terminate.

    Row: input_evaluation: is / wis / simulation
    """
    length = ends.get("episode_horizon", 5)
    with worker(
        rollout_fragment_length=10 * length, input_evaluation=["is"], num_envs=1, **ends
    ) as made:
        episodes = made.sample().split_by_episode()
        whole = sum(rows["cut"][-1] > 1 for rows in episodes)
        [one] = estimates(made)
        assert (one.metrics["n"], one.metrics["given_up"]) == (whole, 0)
        assert whole >= 10


def judged(root, *methods, action=Discrete(3, 1)):  # noqa: B008  it never changes
    """The metrics of each estimator over a log, whose columns the worker asks for."""
    arguments = {"env_creator": None, "policy": PolicySpec(Box((2,)), action), "seed": 1}
    arguments |= {"log_dir": str(root), "input_evaluation": list(methods)}

    def whole_log(ioctx):
        return ShardReader(ioctx.log_dir, policy_id="default", batch_size=1000)

    with RolloutWorker(**arguments, input_creator=whole_log) as made:
        made.sample()
        return {one.estimator_name: one.metrics for one in estimates(made)}


def test_episodes_that_estimators_exclude_are_counted(bandit_log, tmp_path):
    """Abandoned and broken episodes, those without a propensity, and rewards beyond float32. The
    log's own value is over the same episodes, and value models are not fitted to others.

    Row: input_evaluation: is / wis / simulation
    """
    log = bandit_log(400)
    log.rewards[:], log.rewards[100:200] = 1.0, 0.0
    log.ended[100:160], log.ended[160:200] = ["abandoned"] * 60, ["broken"] * 40
    log.rewards[200:250], log.logp[200:250] = 10.0, np.nan
    log.rewards[7] = 1e300
    log.write(tmp_path)
    found = judged(tmp_path, "wis", "is", "dm", "v_behavior")
    gone = {"abandoned": 60, "broken": 40, "not_finite": 1}
    for name in ("wis", "is"):
        assert found[name]["excluded"] == gone | {"no_propensity": 50}
        assert (found[name]["n"], found[name]["v_old"]) == (249, 1.0)
    assert found["wis"]["value"] == found["wis"]["v_gain"] == pytest.approx(1.0)
    for name in ("dm", "v_behavior"):
        assert found[name]["excluded"] == gone
        assert (found[name]["n"], found[name]["v_old"]) == (299, pytest.approx(749 / 299))
    assert found["dm"]["value"] == pytest.approx(749 / 299, rel=0.1)


def test_a_log_without_an_episode_to_judge_by_is_unavailable(bandit_log, tmp_path):
    """The reason and the counts are told; nothing is invented.

    Row: input_evaluation: is / wis / simulation
    """
    log = bandit_log(20)
    log.ended[:] = ["abandoned"] * 20
    log.write(tmp_path)
    for found in judged(tmp_path, "wis", "v_behavior", "dr").values():
        assert "no episodes are left to judge by (abandoned: 20)" in found["unavailable"]
        assert (found["excluded"], found["v_old"]) == ({"abandoned": 20}, None)


def test_a_sampled_log_is_weighted_by_its_probabilities(tmp_path):
    """An episode logged with probability 0.1 counts ten times.

    Row: input_evaluation: is / wis / simulation
    """
    rng, earned = np.random.default_rng(0), np.repeat([[0.0], [1.0]], 100, axis=0)
    given = (rng.normal(size=(200, 1, 2)), rng.integers(4, size=(200, 1)), earned)
    chances = np.where(earned[:, 0] > 0, 1.0, 0.1)
    log_episodes(tmp_path, *given, np.full((200, 1), 0.25), pass_prob=chances)
    found = judged(tmp_path, "v_behavior", "wis", action=Discrete(4))
    for one in found.values():
        assert one["v_old"] == pytest.approx(100 / 1100)
    assert found["v_behavior"]["value"] == pytest.approx(100 / 1100)
    assert found["wis"]["value"] == pytest.approx(100 / 1100, rel=0.1)


def test_episodes_that_are_never_seen_whole_are_told(caplog):
    """The estimate says why it is missing, and counts waiting rows and dropped episodes. A warning
    says that the evaluated episodes are a selection."""
    rows = worker(rollout_fragment_length=10).sample()
    given = [rows.slice(0, 3), rows.slice(7, 10)]
    with worker(input_evaluation=["is"], input_creator=lambda ioctx: Given(given)) as made:
        made.sample()
        made.sample()
        [one] = estimates(made)
        assert "no complete episode" in one.metrics["unavailable"]
        assert one.metrics["open_rows"] == 3
        assert one.metrics["given_up"] == 1
        assert estimates(made) == []
    assert sum("given up" in one.getMessage() for one in caplog.records) == 1


def play_out(made):
    """Wait until all permitted episodes have been played, or playing has failed."""
    made._sampling._simulation._wanted.join()


def test_a_simulation_plays_beside_the_input_for_its_metrics():
    """A thread plays the worker's own environments with its policy; their rows are discarded, their
    episodes are in the metrics.

    Row: input_evaluation: is / wis / simulation
    """
    rows = worker().sample()
    arguments = {
        "input_evaluation": ["simulation"],
        "input_creator": lambda ioctx: Given([rows, rows, rows]),
        "env_config": {"length": 3},
    }
    with worker(**arguments) as made:
        batches = [made.sample() for _ in range(3)]
        assert [one.count for one in batches] == [8, 8, 8]
        play_out(made)
        metrics = made.get_metrics()
        assert [one.length for one in metrics] == [3, 3, 3]
        assert all(isinstance(one, RolloutMetrics) for one in metrics)
    with worker(**arguments | {"env_config": {"fails": {0: 1}}}) as made:
        made.sample()
        play_out(made)
        with pytest.raises(OSError, match=r"^$"):
            made.sample()
