"""Remote workers, on a real Ray on this machine.

Also of `policy.worker.ray_actor`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from policy.worker.group import WorkerGroup
from policy.worker.rollout_worker import RolloutWorker
from tests.policy.toy_envs import AgentsEnv, CountEnv

# Ray's own: it leaves files and sockets open until the interpreter exits.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests, started once; a token guards its ports."""
    import ray  # noqa: PLC0415  half a second that the other files are spared

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # lower priority by default
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


class Blocks(CountEnv):
    """A copy of worker 2 that finds the flag set blocks in its third step until its process is
    killed."""

    def step(self, action):
        flag = Path(self.context["flag"])
        if self.t == 2 and self.context["worker"] == 2 and flag.exists():
            flag.unlink()
            flag.with_suffix(".part").write_text(str(os.getpid()))
            flag.with_suffix(".part").rename(flag.with_suffix(".pid"))
            threading.Event().wait()
        return super().step(action)


class Fickle(RolloutWorker):
    """Raises in the next call of the method named by `raises_in`."""

    raises_in = None

    def _perhaps(self, method):
        if self.raises_in == method:
            self.raises_in = None
            raise LookupError(method)

    def sample(self, **kwargs):
        self._perhaps("sample")
        return super().sample(**kwargs)

    def get_metrics(self):
        self._perhaps("get_metrics")
        return super().get_metrics()

    def get_filters(self, flush_after=False):
        self._perhaps("get_filters")
        return super().get_filters(flush_after)

    def set_weights(self, *args, **named):
        self._perhaps("set_weights")
        super().set_weights(*args, **named)


def create(context):
    return Blocks({**context, "worker": context.worker_index})


def arguments(**more):
    return {
        "env_creator": create,
        "env_config": {"flag": "/nowhere"},
        "rollout_fragment_length": 4,
        "num_envs": 2,
        "seed": 1,
        **more,
    }


@pytest.fixture(scope="module")
def flag(tmp_path_factory):
    return tmp_path_factory.mktemp("group") / "armed"


@pytest.fixture(scope="module")
def group(ray, flag):
    """Two remote workers for all tests, in the order of this file."""
    made = WorkerGroup(
        RolloutWorker,
        2,
        arguments(env_config={"flag": str(flag)}, observation_filter="MeanStdFilter"),
        actor_options={"num_cpus": 0.25},
        most_restarts=1,
    )
    yield made
    made.stop()


def test_a_worker_class_becomes_an_actor_class(ray):
    """`.remote` takes the constructor's arguments, the methods are the same, and actor resources
    can be set.

    Row: as_remote(num_cpus, num_gpus, memory, object_store_memory, resources)
    """
    cls = RolloutWorker.as_remote(num_cpus=0.25, memory=10_000_000)
    worker = cls.remote(**arguments(worker_index=1))
    batch, count = ray.get(worker.sample_with_count.remote())
    here = RolloutWorker(**arguments(worker_index=1))
    assert (count, batch.count) == (8, 8)
    assert (batch["actions"] == here.sample()["actions"]).all()
    ray.kill(worker)
    assert RolloutWorker.as_remote() is not None


def versions(batches):
    return {int(version) for one in batches for version in one["policy_version"]}


def test_filters_of_a_group_count_every_observation_once(group):
    """After two rounds of merging, all filters hold the statistics of all samples."""
    seen = []
    for _ in range(2):
        seen += [one["obs"] for one in group.sample()]
        group.sync_filters()
    data = np.concatenate(seen).astype(np.float64)
    for n, mean in group.foreach_worker(
        lambda worker: (worker.filters["default"].stats.n, worker.filters["default"].stats.mean)
    ):
        assert n == len(data) == 32
        np.testing.assert_allclose(mean, data.mean(axis=0), rtol=1e-9)


def test_a_group_samples_learns_and_sends_weights_once(group):
    """Every worker returns a sample; after sync_weights all act with the new version, which was put
    into Ray's store once."""
    batches = group.sample()
    assert [one.count for one in batches] == [8, 8]
    assert len({stream for one in batches for stream in one["stream"]}) == 2
    assert versions(batches) == {0}
    group.local_worker.learn_on_batch(batches[0])
    sent = group.stats.weights_sent
    assert group.sync_weights({"timestep": 16}) == 1
    assert group.stats.weights_sent == sent + 1
    assert versions(group.sample()) == {1}
    weights = group.foreach_worker(lambda worker: worker.get_weights()["default"]["pi.0.bias"])
    assert len(weights) == 3
    for one in weights[1:]:
        np.testing.assert_array_equal(one, weights[0])
    assert group.foreach_worker(lambda worker: worker.settings.worker_index) == [0, 1, 2]
    assert group.foreach_worker(lambda worker: worker.get_global_vars()) == [{"timestep": 16}] * 3
    assert group.foreach_policy(lambda policy, name: name) == ["default"] * 3
    assert {one.length for one in group.get_metrics()} == {5}


def test_what_a_workers_own_code_raises_reaches_the_driver(group):
    """The worker is not counted as lost, and the exception keeps its type."""

    def fails(worker):
        if worker.settings.worker_index:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        group.foreach_worker(fails)
    assert group.stats.lost == 0


def test_a_worker_that_is_killed_while_it_samples_costs_its_fragment_alone(group, flag):
    """SIGKILL in the middle of a sample: the other worker's batch is returned, and learning and
    sending continue. The next sample has both again, the new worker with the latest weights and
    filters."""
    flag.touch()
    killer = threading.Thread(target=kill_when_stuck, args=(flag.with_suffix(".pid"),))
    killer.start()
    [batch] = group.sample()
    killer.join()
    assert (batch.count, group.stats.lost) == (8, 1)
    group.local_worker.learn_on_batch(batch)
    assert group.sync_weights() == 2
    again = group.sample()
    assert [one.count for one in again] == [8, 8]
    assert versions(again) == {2}
    assert group.stats.restarted == 1
    _, *seeds = group.foreach_worker(lambda worker: worker.env.seeds[:1])
    assert seeds == [[1 + 10_007], [1 + 10_007 * (2 + 3)]]
    seen = group.foreach_worker(lambda worker: worker.filters["default"].stats.n)
    assert seen[2] == seen[0] + 8
    group.sync_weights()
    assert versions(group.sample()) == {3}


@pytest.mark.long
def test_who_takes_a_lost_ones_place_gets_every_policy(ray):
    """This holds even if the last weights sent were those of one policy alone."""
    given = {
        "env_creator": AgentsEnv,
        "policy": {"left": None, "right": None},
        "policy_mapping_fn": {"a": "left", "b": "right"}.__getitem__,
        "seed": 1,
    }
    with WorkerGroup(RolloutWorker, 1, given, actor_options={"num_cpus": 0.25}) as pair:
        for name in ("left", "right"):
            policy = pair.local_worker.get_policy(name)
            shifted = {key: value + 1 for key, value in policy.get_weights().items()}
            policy.set_weights(shifted)
            pair.sync_weights(policies=[name])
        pair.foreach_worker(die)
        own, other = pair.foreach_worker(lambda worker: worker.get_weights())
        assert own.keys() == other.keys() == {"left", "right"}
        for name in own:
            for key, value in own[name].items():
                np.testing.assert_array_equal(other[name][key], value)


def die(worker):
    if worker.settings.worker_index:
        os._exit(1)


@pytest.fixture(scope="module")
def fickle(ray):
    """Two remote workers that raise on request."""
    made = WorkerGroup(
        Fickle,
        2,
        arguments(observation_filter="MeanStdFilter"),
        actor_options={"num_cpus": 0.25},
    )
    yield made
    made.stop()


def arm(group, method):
    """Make worker 2 raise in its next call of that method."""

    def plant(worker):
        worker.raises_in = method if worker.settings.worker_index == 2 else None

    group.foreach_worker(plant)


@pytest.mark.long
def test_one_workers_error_costs_no_other_workers_batch(fickle):
    """The next sample has the good worker's batch, and calls only the other one again."""
    arm(fickle, "sample")
    with pytest.raises(LookupError, match="sample"):
        fickle.sample()
    first, second = fickle.sample()
    here = RolloutWorker(**arguments(worker_index=1, observation_filter="MeanStdFilter"))
    assert (first["actions"] == here.sample()["actions"]).all()
    assert first["stream"][0] != second["stream"][0]
    seen = fickle.foreach_worker(lambda worker: worker.filters["default"].stats.n)
    assert seen[1:] == [8, 8]
    assert len(fickle.sample()) == 2


@pytest.mark.long
def test_one_workers_error_costs_no_metrics(fickle):
    """Metrics drained elsewhere are in the next answer."""
    arm(fickle, "get_metrics")
    with pytest.raises(LookupError, match="get_metrics"):
        fickle.get_metrics()
    assert [one.length for one in fickle.get_metrics()] == [5] * 4


@pytest.mark.long
def test_one_workers_error_costs_no_observation_of_a_filter(fickle):
    """Data flushed elsewhere is in the driver's filter; the next round counts the rest."""
    arm(fickle, "get_filters")
    with pytest.raises(LookupError, match="get_filters"):
        fickle.sync_filters()
    fickle.sync_filters()
    seen = fickle.foreach_worker(lambda worker: worker.filters["default"].stats.n)
    assert seen == [32] * 3


@pytest.mark.long
def test_weights_that_a_worker_cannot_take_are_not_silent(fickle):
    """The next call to that worker raises its error."""
    arm(fickle, "set_weights")
    fickle.sync_weights({"timestep": 1})
    with pytest.raises(LookupError, match="set_weights"):
        fickle.sample()


def test_a_group_that_was_stopped_says_so(fickle):
    """Every call but stop raises."""
    fickle.stop()
    fickle.stop()
    calls = [fickle.sample, fickle.sync_weights, fickle.sync_filters, fickle.get_metrics]
    for call in [*calls, lambda: fickle.foreach_worker(str)]:
        with pytest.raises(RuntimeError, match="this group was stopped"):
            call()


@pytest.mark.long
def test_a_group_without_anybody_left_says_so(group):
    """Workers that die after each restart are dropped, and a group without any raises."""
    for _ in range(2):
        group.foreach_worker(die)
    with pytest.raises(RuntimeError, match="none of 2 remote workers answered; ") as caught:
        group.sample()
    assert f"answered; lost so far: {group.stats.lost}," in str(caught.value)
    assert group.stats.lost >= 4  # each twice, and one more where its test ran before
    assert group.remote_workers == []
    with pytest.raises(ValueError, match="num_workers: expected 1 or more"):
        WorkerGroup(RolloutWorker, 0, arguments())


def kill_when_stuck(path):
    waiting = threading.Event()
    while not path.exists():
        waiting.wait(0.02)
    os.kill(int(path.read_text()), signal.SIGKILL)


def test_without_ray_the_extra_is_named():
    """In a process that cannot import Ray, everything else works and as_remote names the package to
    install."""
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from headrace import RolloutWorker, WorkerGroup\n"
        "for call in (RolloutWorker.as_remote, lambda: WorkerGroup(RolloutWorker, 1, {})):\n"
        "    try:\n"
        "        call()\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.count("pip install headrace[ray]") == 2, done.stderr
