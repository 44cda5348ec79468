"""The rollout worker: environments, policies, and everything between them.

    worker = RolloutWorker(
        env_creator=lambda context: gymnasium.make("CartPole-v1"),
        policy=TrainablePolicy,
        num_envs=8,
        rollout_fragment_length=32,
        seed=7,
    )
    batch = worker.sample()                       # 256 steps
    info = worker.learn_on_batch(batch)
    for episode in worker.get_metrics(): ...
    worker.stop()

docs/workers.md describes every argument. As a Ray actor: `RolloutWorker.as_remote(num_cpus=1)`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.algorithms.data_parallel import (
    all_or_none,
    broadcast_weights,
    find_free_port,
    get_node_ip,
    join_group,
    leave_group,
    require_same_setup,
)
from policy.algorithms.trainable_policy import TrainablePolicy
from policy.envs.env_runner import EnvRunner
from policy.inference.filters import MeanStdFilter, NoFilter
from policy.networks.export import export_checkpoint, export_model, export_onnx
from policy.sampling.callbacks import make_callbacks
from policy.sampling.metrics import MetricsRecorder, OffPolicyEstimate, RolloutMetrics
from policy.worker.env_creation import EnvMaker, env_spaces, is_multi_agent
from policy.worker.input_evaluation import SIMULATION, InputEvaluation, check_methods
from policy.worker.policy_map import build_policies, make_mapping
from policy.worker.ray_actor import remote_class
from policy.worker.sample_collection import Sampling
from policy.worker.settings import DROPPED, WorkerSettings
from policy.worker.state import (
    check_fits,
    filter_from_json,
    pack,
    restore_policy,
    tensors_of,
    unpack,
    write_bytes,
)
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.interfaces import EndOfInput
from storage.experience.multi_agent_batch import Batch, MultiAgentBatch
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Space

__all__ = ["RolloutWorker"]

Filters = dict[str, MeanStdFilter | NoFilter]
Weights: TypeAlias = dict[str, dict[str, npt.NDArray[np.float32]]]
_MULTI_AGENT = "a MultiAgentBatch, whose keys are policies"


class RolloutWorker(EnvRunner):
    """Samples from environments or from an input, learns, and reports.

    Arguments are those of `WorkerSettings`, with the names of old as well; the first four also by
    position. One thread at a time may use a worker.

    Attributes: `policies` by id; `policies_to_train`; `settings`; `env`, the first copy;
    `restarts`, failures of environments and the partial episodes they cost; `callbacks`;
    `excluded`, why -> rows that were played and are in no sample.
    """

    def __init__(
        self,
        env_creator: Callable[..., Any] | None = None,
        policy: Any = None,
        policy_mapping_fn: Callable[..., str] | None = None,
        policies_to_train: Collection[str] | None = None,
        **arguments: Any,
    ) -> None:
        first = {
            "env_creator": env_creator,
            "policy": policy,
            "policy_mapping_fn": policy_mapping_fn,
            "policies_to_train": policies_to_train,
        }
        named = {name: value for name, value in first.items() if value is not None} | arguments
        self.settings = WorkerSettings.from_arguments(named)
        super().__init__(config=named)
        self.restarts.limits = self.settings.restart_limits
        self._prepare_process()
        self.global_vars: dict[str, Any] = {}
        self.worker_rng = np.random.default_rng(
            None if self.settings.seed is None else [self.settings.seed, self.settings.seed_place]
        )
        self.recorder = MetricsRecorder()
        self.excluded: Counter[str] = Counter()
        self.callbacks = make_callbacks(self.settings.callbacks)
        self._stopped = False
        self._sampling: Sampling | None = None
        self.policies: dict[str, TrainablePolicy] = {}
        self.make_env()
        self.make_module()
        self._sampling = Sampling.of(self)
        self._estimates = self._make_evaluation()

    def __repr__(self) -> str:
        index, of = self.settings.worker_index, self.settings.num_workers
        policies = ", ".join(f"{k} version {p.version}" for k, p in self.policies.items())
        return f"RolloutWorker({index} of {of}, env {self.env}; {policies})"

    def _prepare_process(self) -> None:
        os.environ.update(self.settings.extra_python_environs)
        if self.settings.log_level is not None:
            level = "WARNING" if self.settings.log_level == "WARN" else self.settings.log_level
            logging.getLogger("headrace.worker").setLevel(level)

    # what a runner makes

    def make_env(self) -> None:
        """Make the first copy; none where the worker only reads an input."""
        self.env = None
        if self.settings.env_creator is not None:
            self.env = EnvMaker.of(self.settings)(0)

    def make_module(self) -> None:
        """Build the policies, in the order of their ids."""
        spaces = None if self.env is None else env_spaces(self.env)
        multi_agent = self.env is not None and is_multi_agent(self.env)
        self.policies = build_policies(self.settings, spaces, multi_agent=multi_agent)
        self._require_concurrent_filters()
        self.policy_of = make_mapping(self.settings, self.policies)
        chosen = self.settings.policies_to_train
        unknown = sorted(set(chosen or ()) - set(self.policies))
        if unknown:
            raise ValueError(
                f"policies_to_train: expected some of {sorted(self.policies)}, got {unknown}"
            )
        self.policies_to_train = [p for p in self.policies if chosen is None or p in chosen]

    def _require_concurrent_filters(self) -> None:
        """What samples in a thread needs filters that two threads may use."""
        settings = self.settings
        if not (settings.sample_async or SIMULATION in settings.input_evaluation):
            return
        plain = [name for name, one in self.filters.items() if type(one) is MeanStdFilter]
        if plain:
            raise ValueError(
                f"policies {plain}: expected observation_filter 'ConcurrentMeanStdFilter', because "
                "one thread samples while another reads the filter"
            )

    def _make_evaluation(self) -> InputEvaluation | None:
        methods = check_methods(self.settings.input_evaluation)
        estimators = [name for name in methods if name != SIMULATION]
        if not estimators:
            return None
        if len(self.policies) > 1:
            raise NotImplementedError(
                "input_evaluation: expected a single policy; judge each policy's log by "
                "policy.jobs.evaluate"
            )
        policy = next(iter(self.policies.values()))
        return InputEvaluation(estimators, policy, policy.settings.algorithm.gamma)

    # what a runner does

    def assert_healthy(self) -> None:
        """Raise RuntimeError for a worker that is stopped, or has neither environment nor input."""
        if self._stopped or self._sampling is None:
            raise RuntimeError("this worker was stopped")
        self._sampling.require_input()

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Policy id -> (observation space, action space), as they were given."""
        return {k: (p.observation_space, p.action_space) for k, p in self.policies.items()}

    def descriptors(self) -> dict[str, tuple[Space, Space]]:
        """The same as Headrace's descriptors: what `ParquetOutputWriter` takes."""
        return {k: (p.spec.observation, p.spec.action) for k, p in self.policies.items()}

    def _env_at(self, copy: Any) -> Any:
        return self._live().env_at(copy)

    def _remake(self, copy: Any) -> None:
        self._live().remake(copy)

    def _live(self) -> Sampling:
        if self._sampling is None:
            raise RuntimeError("expected a worker that was set up and not stopped")
        return self._sampling

    # sampling

    def sample(self, **kwargs: Any) -> Batch:
        """A batch: the input's batches joined, then `on_sample_end`, the output writer, the
        estimators, compression, in this order.

        truncate_episodes: rollout_fragment_length * num_envs steps (fewer when postprocessing takes
        rows away), of at most num_envs batches of the input. complete_episodes: whole episodes, at
        least that many steps. Raises EndOfInput, EnvFailed, the exception of an environment that is
        not restarted, and TypeError for any argument.
        """
        WorkerSettings.refuse_for_sample(kwargs)
        self.assert_healthy()
        live = self._live()
        batch = live.gather()
        self.callbacks.on_sample_end(worker=self, samples=batch)
        live.write(batch)
        if self._estimates is not None:
            self._estimates.add(batch)
        live.simulate()
        if self.settings.compress_observations:
            batch.compress(bulk=self.settings.compress_observations == "bulk")
        return batch

    def sample_with_count(self) -> tuple[Batch, int]:
        """(batch, its steps of the environment)."""
        batch = self.sample()
        return batch, batch.count

    def __iter__(self) -> Iterator[Batch]:
        """Samples without end, or until the input ends."""
        while True:
            try:
                yield self.sample()
            except EndOfInput:
                return

    def get_metrics(self) -> list[RolloutMetrics | OffPolicyEstimate]:
        """Episodes that ended, and estimates from whole episodes of the input, since the last
        call."""
        drained: list[RolloutMetrics | OffPolicyEstimate] = list(self.recorder.drain())
        return drained + (self._estimates.estimates() if self._estimates is not None else [])

    # weights and global variables

    def get_weights(self, policies: Collection[str] | None = None) -> Weights:
        """Policy id -> name -> array: copies, never views. Raises KeyError for an unknown id."""
        chosen = self.policies if policies is None else policies
        return {policy_id: self._policy(policy_id).get_weights() for policy_id in chosen}

    def set_weights(
        self,
        weights: Mapping[str, Mapping[str, npt.NDArray[Any]]],
        global_vars: Mapping[str, Any] | None = None,
        *,
        version: int | Mapping[str, int] = -1,
    ) -> None:
        """Copy weights in; then `set_global_vars` if there are any.

        `version` (one, or one per policy) is stored with every step that they act in. Raises
        KeyError for an unknown id, before anything changes, and ValueError for weights that do not
        fit.
        """
        known = {policy_id: self._policy(policy_id) for policy_id in weights}
        for policy_id, policy in known.items():
            number = version if isinstance(version, int) else version.get(policy_id, -1)
            policy.set_weights(weights[policy_id], version=number)
        if global_vars:
            self.set_global_vars(global_vars)

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Keep them and tell every policy, whose schedules follow `timestep`."""
        for policy in self.policies.values():
            policy.on_global_var_update(global_vars)
        self.global_vars = dict(global_vars)

    def get_global_vars(self) -> dict[str, Any]:
        """A copy of what was set last; empty before."""
        return dict(self.global_vars)

    def _policy(self, policy_id: str) -> TrainablePolicy:
        if policy_id not in self.policies:
            raise KeyError(f"no policy {policy_id!r}; the policies are {sorted(self.policies)}")
        return self.policies[policy_id]

    # what is learned from

    def _shares(
        self,
        samples: Batch,
        *,
        expected: int | None = None,
        epochs: int = 1,
        minibatch: int | None = None,
    ) -> dict[str, SampleBatch]:
        """Policy id -> the rows that it learns from, in the order of the ids, of trained policies
        alone; refused on every rank unless all ranks have as many for each."""
        names = {policy_id: f"policy {policy_id!r}" for policy_id in sorted(self.policies)}
        counts = dict.fromkeys(names.values(), 0)
        counts |= {"num_sgd_iter": epochs, "sgd_minibatch_size": minibatch or 0}
        with all_or_none(counts, max(one.world_size for one in self.policies.values())):
            if expected is not None and samples.count not in (0, expected):
                raise ValueError(
                    f"sample_and_learn: expected a batch of {expected} steps, got "
                    f"{samples.count}: truncate_episodes gives fragments of exact size"
                )
            mine = self._trainable(samples)
            counts |= {names[policy_id]: rows.count for policy_id, rows in mine.items()}
        return mine

    def _trainable(self, samples: Batch) -> dict[str, SampleBatch]:
        """The batches of policies that are trained; others are left as they are."""
        if not isinstance(samples, MultiAgentBatch):
            return {self._only(): _plain(samples)}
        return {
            policy_id: _plain(rows)
            for policy_id, rows in sorted(samples.policy_batches.items())
            if self._policy(policy_id) and policy_id in self.policies_to_train and rows.count
        }

    def _only(self) -> str:
        """The default policy's id, or that of the one there is."""
        if DEFAULT_POLICY in self.policies:
            return DEFAULT_POLICY
        if len(self.policies) == 1:
            return next(iter(self.policies))
        raise ValueError(
            f"expected {_MULTI_AGENT}, because there are the policies {sorted(self.policies)}"
        )

    # gradients

    def compute_gradients(self, samples: Batch) -> tuple[Any, dict[str, Any]]:
        """Of one policy: (gradients, info with `batch_count`). Of several: (policy id -> gradients,
        {"info": policy id -> info, "batch_count": env steps}), trained policies alone."""
        found = {
            policy_id: self.policies[policy_id].compute_gradients(rows)
            for policy_id, rows in self._shares(samples).items()
        }
        if not isinstance(samples, MultiAgentBatch):
            [(gradients, info)] = found.values()
            return gradients, {**info, "batch_count": samples.count}
        gradients_of = {policy_id: pair[0] for policy_id, pair in found.items()}
        info_of = {policy_id: pair[1] for policy_id, pair in found.items()}
        return gradients_of, {"info": info_of, "batch_count": samples.count}

    def apply_gradients(self, gradients: Mapping[str, Sequence[Any]] | Sequence[Any]) -> None:
        """One optimizer step: a mapping by policy id, whether trained here or not; a list for the
        default policy. Raises ValueError when their number or shapes differ from the parameters'.
        """
        if isinstance(gradients, Mapping):
            for policy_id in gradients:
                self._policy(policy_id)
            for policy_id, mine in gradients.items():
                self.policies[policy_id].apply_gradients(mine)
        else:
            self.policies[self._only()].apply_gradients(gradients)

    def learn_on_batch(self, samples: Batch) -> dict[str, Any]:
        """One gradient step: info with `learner_stats` of one policy; of several, policy id -> info
        of those that are trained. Names are the same whatever the batch: where it has no row to
        learn from nothing changes, `batch_count` is 0 and the statistics are NaN."""
        found = {
            policy_id: self.policies[policy_id].learn_on_batch(rows)
            for policy_id, rows in self._shares(samples).items()
        }
        if not isinstance(samples, MultiAgentBatch):
            return next(iter(found.values()))
        empty = {"batch_count": 0, "left_out": {}}
        return {
            policy_id: found[policy_id]
            if policy_id in found
            else {"learner_stats": self.policies[policy_id].no_stats(), **empty}
            for policy_id in sorted(self.policies_to_train)
        }

    def sample_and_learn(
        self,
        expected_batch_size: int,
        num_sgd_iter: int,
        sgd_minibatch_size: int | None,
        standardize_fields: Sequence[str] = (),
    ) -> tuple[dict[str, Any], int]:
        """Sample, standardise fields, and learn for some epochs over minibatches.

        Fields become (x - mean) / max(1e-4, std), once and in a copy. Minibatches are slices of
        shuffled rows (rows with recurrent state keep their order) in a random order; the last one
        may be short; size None or 0 is the whole batch. Gives (statistics averaged over the last
        epoch's minibatches, steps sampled); NaN statistics and 0 steps of an input that is idle.
        Raises ValueError for another count than expected.
        """
        if num_sgd_iter < 1:
            raise ValueError(f"num_sgd_iter: expected 1 or more, got {num_sgd_iter}")
        batch = self.sample()
        shares = self._shares(
            batch, expected=expected_batch_size, epochs=num_sgd_iter, minibatch=sgd_minibatch_size
        )
        found = {
            policy_id: self._epochs(
                self.policies[policy_id],
                rows,
                num_sgd_iter,
                sgd_minibatch_size,
                standardize_fields,
            )
            for policy_id, rows in shares.items()
        }
        if not isinstance(batch, MultiAgentBatch):
            return next(iter(found.values())), batch.count
        trained = sorted(self.policies_to_train)
        return {k: found.get(k) or self.policies[k].no_stats() for k in trained}, batch.count

    def _epochs(
        self,
        policy: TrainablePolicy,
        batch: SampleBatch,
        epochs: int,
        size: int | None,
        fields: Sequence[str],
    ) -> dict[str, Any]:
        if not batch.count:
            return policy.no_stats()
        batch = standardised(batch, fields)
        stats: list[dict[str, float]] = []
        for _ in range(epochs):
            stats = [
                policy.learn_on_batch(piece)["learner_stats"]
                for piece in _pieces(batch, size, self.worker_rng)
            ]
        return {name: _mean([one[name] for one in stats]) for name in stats[0]}

    # data parallel

    def setup_torch_data_parallel(
        self, url: str, world_rank: int, world_size: int, backend: str = "gloo"
    ) -> None:
        """Join `world_size` workers in learning: from now on `learn_on_batch` and
        `compute_gradients` take the mean of all ranks' gradients, and every rank has to call them
        as often, with as many rows for each trained policy; else all ranks raise ValueError. Begins
        with the weights of rank 0.

        `url` is torch.distributed's init_method, e.g. "tcp://127.0.0.1:29500". Raises ValueError
        for a policy that is no torch policy, for a rank outside the world, and on every rank when
        their policies differ.
        """
        for policy_id, policy in self.policies.items():
            if not isinstance(policy, TrainablePolicy):
                raise ValueError(f"policy {policy_id!r}: expected a torch policy, got {policy!r}")
        join_group(url, world_rank, world_size, backend)
        described = {
            policy_id: [tuple(one.shape) for one in self.policies[policy_id].module.parameters()]
            for policy_id in sorted(self.policies)
        }
        try:
            require_same_setup(f"{described}, trained {sorted(self.policies_to_train)}", world_size)
        except ValueError:
            leave_group()
            raise
        for policy_id in described:
            policy = self.policies[policy_id]
            broadcast_weights(policy.module)
            policy.world_size = world_size

    # filters

    @property
    def filters(self) -> Filters:
        """Each policy's own filter."""
        return {policy_id: policy.filter for policy_id, policy in self.policies.items()}

    def get_filters(self, flush_after: bool = False) -> Filters:
        """Plain copies with their unmerged observations; `flush_after` clears these here, so that a
        driver that merges the copies never counts them twice."""
        return {name: _copied(one, flush=flush_after) for name, one in self.filters.items()}

    def sync_filters(self, new_filters: Mapping[str, MeanStdFilter | NoFilter]) -> None:
        """Become copies of these, buffers included. Raises ValueError unless all are there."""
        mine = self.filters
        missing = sorted(set(mine) - set(new_filters))
        if missing:
            raise ValueError(f"sync_filters: expected filters of {sorted(mine)}, missing {missing}")
        for name, one in mine.items():
            theirs = new_filters[name]
            if isinstance(one, MeanStdFilter):
                if not isinstance(theirs, MeanStdFilter):
                    raise ValueError(f"sync_filters: {name}: expected a MeanStdFilter")
                one.sync(theirs)

    # environments and policies

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func` of every copy, in order; an env that is no vector gives one call."""
        return [func(env) for env in self._live().sub_environments()]

    def get_policy(self, policy_id: str = DEFAULT_POLICY) -> TrainablePolicy | None:
        """The policy, None for an unknown id."""
        return self.policies.get(policy_id)

    def for_policy(
        self, func: Callable[[TrainablePolicy], Any], policy_id: str = DEFAULT_POLICY
    ) -> Any:
        """`func` of one policy. Raises KeyError for an unknown id."""
        return func(self._policy(policy_id))

    def foreach_policy(self, func: Callable[[TrainablePolicy, str], Any]) -> list[Any]:
        """`func(policy, policy id)` of all, in the order of the map."""
        return [func(policy, policy_id) for policy_id, policy in self.policies.items()]

    def foreach_trainable_policy(self, func: Callable[[TrainablePolicy, str], Any]) -> list[Any]:
        """The same of the policies to train."""
        return [func(self.policies[name], name) for name in self.policies_to_train]

    # state

    def save(self) -> bytes:
        """Filters with their unmerged observations (which are cleared here), weights, optimizers,
        global variables and random state, as safetensors: nothing in it is executed. See
        policy.worker.state."""
        filters = {
            name: one
            for name, one in self.get_filters(flush_after=True).items()
            if isinstance(one, MeanStdFilter)
        }
        rng = dict(self.worker_rng.bit_generator.state)
        return pack(self.policies, filters, global_vars=self.global_vars, rng=rng)

    def save_to(self, path: Path | str) -> Path:
        """`save` into a file: after a crash there is the old one or the new one, whole."""
        return write_bytes(path, self.save())

    def restore(self, data: bytes) -> None:
        """Go on from `save`. Raises WeightsDamaged for damaged bytes, ValueError for another
        worker's; nothing is changed then. Environments begin new episodes at their own time."""
        body, tensors = unpack(data)
        check_fits(body, self.policies)
        filters = {
            one["id"]: filter_from_json(one["filter"], self.policies[one["id"]].spec.flattener.size)
            for one in body["policies"].values()
            if one["filter"] is not None
        }
        for place, document in body["policies"].items():
            policy = self.policies[document["id"]]
            restore_policy(policy, document, tensors_of(place, tensors))
            if document["id"] in filters and isinstance(policy.filter, MeanStdFilter):
                policy.filter.sync(filters[document["id"]])
        self.worker_rng.bit_generator.state = body["rng"]
        if body["global_vars"]:
            self.set_global_vars(body["global_vars"])

    def restore_from(self, path: Path | str) -> None:
        """`restore` from a file."""
        self.restore(Path(path).read_bytes())

    def export_policy_model(
        self,
        directory: Path | str,
        policy_id: str = DEFAULT_POLICY,
        *,
        onnx: bool = False,
    ) -> Path:
        """Write the network for other programs: torch.export, or ONNX with the [onnx] extra."""
        export = export_onnx if onnx else export_model
        return export(self._policy(policy_id), directory)

    def export_policy_checkpoint(
        self, directory: Path | str, prefix: str = "model", policy_id: str = DEFAULT_POLICY
    ) -> Path:
        """Write the state_dict as safetensors, and the spec beside it."""
        return export_checkpoint(self._policy(policy_id), directory, prefix)

    def import_policy_model_from_h5(self, *args: Any, **kwargs: Any) -> None:
        """TensorFlow's: always NotImplementedError, which names the replacement."""
        name = "import_policy_model_from_h5"
        raise NotImplementedError(f"{name}: {DROPPED[name]}")

    # the rest

    def apply(self, func: Callable[[Any], Any]) -> Any:
        """`func(worker)`: a group calls it on remote workers."""
        return func(self)

    def creation_args(self) -> dict[str, Any]:
        """The constructor's arguments as they were given."""
        return dict(self.config)

    @classmethod
    def as_remote(
        cls,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: int | None = None,
        object_store_memory: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> Any:
        """This class as a Ray actor class: call `.remote(...)` with the constructor's arguments.

        Raises ImportError that names the [ray] extra when Ray is not there.
        """
        return remote_class(
            cls,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            memory=memory,
            object_store_memory=object_store_memory,
            resources=resources,
        )

    def get_node_ip(self) -> str:
        """The address by which others reach this machine."""
        return get_node_ip()

    def find_free_port(self) -> int:
        """A TCP port of this machine that is free now."""
        return find_free_port()

    def stop(self) -> None:
        """Close environments, input and output, and leave a data-parallel group; twice is fine."""
        if getattr(self, "_stopped", True):
            return
        self._stopped = True
        if self._sampling is not None:
            self._sampling.close()
        if any(policy.world_size > 1 for policy in self.policies.values()):
            leave_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _copied(one: MeanStdFilter | NoFilter, *, flush: bool) -> MeanStdFilter | NoFilter:
    if not isinstance(one, MeanStdFilter):
        return one
    return one.take_buffer() if flush else one.as_serialisable()


def _mean(values: Sequence[float]) -> float:
    """Over the minibatches that say it: one without a row to learn from says NaN."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def _plain(batch: SampleBatch) -> SampleBatch:
    """The batch with what `compress_observations` packed unpacked, in a batch of its own."""
    return batch.copy(shallow=True).decompress_if_needed()


def standardised(batch: SampleBatch, fields: Sequence[str]) -> SampleBatch:
    """The batch with new columns for these fields; the others are shared."""
    changed = batch.select(list(batch))
    for name in fields:
        if name not in batch:
            raise ValueError(f"standardize_fields: expected some of {sorted(batch)}, got {name!r}")
        values = np.asarray(batch[name], np.float64)
        changed[name] = (values - values.mean()) / max(1e-4, float(values.std()))
    return changed


def _pieces(batch: SampleBatch, size: int | None, rng: np.random.Generator) -> list[SampleBatch]:
    recurrent = "state_in_0" in batch
    pieces = list(batch.minibatches(size, None if recurrent else rng))
    return [pieces[i] for i in rng.permutation(len(pieces))]
