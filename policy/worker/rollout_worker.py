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
from policy.algorithms.learner import named
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
    unpack,
    write_bytes,
)
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.interfaces import EndOfInput, InputReader
from storage.experience.multi_agent_batch import AnyBatch, MultiAgentBatch
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Space

Filters = dict[str, MeanStdFilter | NoFilter]
Weights: TypeAlias = dict[str, dict[str, npt.NDArray[np.float32]]]
_MULTI_AGENT = "a MultiAgentBatch, whose keys are policies"


class RolloutWorker(EnvRunner):
    """Samples from environments or from an input, learns, and reports metrics.

    Arguments are those of `WorkerSettings`, also with their earlier names; the first four may be
    positional. Only one thread at a time may use a worker.

    Attributes: `policies` by id; `policies_to_train`; `settings`; `env`, the first copy;
    `restarts`, which counts failures of environments and the partial episodes lost; `callbacks`;
    `excluded`, why -> rows that were sampled but are in no batch.
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

    # making environments and policies

    def make_env(self) -> None:
        """Create the first copy, unless the worker only reads an input."""
        self.env = None
        if self.settings.env_creator is not None:
            self.env = EnvMaker.of(self.settings)(0)

    def make_module(self) -> None:
        """Create the policies, in the order of their ids."""
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
        """Raise ValueError if sampling uses a thread, but a filter does not support two threads."""
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
                "policy.judging.evaluate"
            )
        policy = next(iter(self.policies.values()))
        return InputEvaluation(estimators, policy, policy.settings.algorithm.gamma)

    # the interface of `EnvRunner`

    def assert_healthy(self) -> None:
        """Raise RuntimeError if the worker was stopped, or has no environment and no input."""
        if self._stopped or self._sampling is None:
            raise RuntimeError("this worker was stopped")
        self._sampling.require_input()

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Policy id -> (observation space, action space), as they were passed."""
        return {k: (p.observation_space, p.action_space) for k, p in self.policies.items()}

    def descriptors(self) -> dict[str, tuple[Space, Space]]:
        """Policy id -> (observation, action) as descriptors, e.g. for `ParquetOutputWriter`."""
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

    @property
    def input_reader(self) -> InputReader:
        """What `sample` reads: the sampler of the environments, or the input. Raises RuntimeError
        without one.
        """
        return self._live().require_input()

    def sample(self, *, num_timesteps: int | None = None, **kwargs: Any) -> AnyBatch:
        """Collect a batch, then apply callbacks, output, estimators and compression, in this order.

        The batch joins the input's batches. truncate_episodes: rollout_fragment_length * num_envs
        steps (fewer if postprocessing removes rows), from at most num_envs batches of the input.
        complete_episodes: whole episodes with at least that many steps. If nothing but excluded
        episodes comes (`excluded` counts them) for ten samples' steps, or an input is idle, the
        batch has fewer rows or none; without rows it keeps its columns. With `num_timesteps` it
        has at least as many steps instead. Raises EndOfInput, EnvFailed, the exception of an
        environment that is not restarted, and TypeError for any other argument.
        """
        WorkerSettings.refuse_for_sample(kwargs)
        if num_timesteps is not None and num_timesteps < 1:
            raise ValueError(f"num_timesteps: expected 1 or more, got {num_timesteps}")
        self.assert_healthy()
        live = self._live()
        batch = live.gather(num_timesteps)
        self.callbacks.on_sample_end(worker=self, samples=batch)
        live.write(batch)
        if self._estimates is not None:
            self._estimates.add(batch)
        live.simulate()
        if self.settings.compress_observations:
            batch.compress(bulk=self.settings.compress_observations == "bulk")
        return batch

    def sample_with_count(self) -> tuple[AnyBatch, int]:
        """(batch, its number of environment steps)."""
        batch = self.sample()
        return batch, batch.count

    def __iter__(self) -> Iterator[AnyBatch]:
        """Yield samples until the input ends."""
        while True:
            try:
                yield self.sample()
            except EndOfInput:
                return

    def get_metrics(self) -> list[RolloutMetrics | OffPolicyEstimate]:
        """The episodes that ended since the last call, and estimates from the input's episodes."""
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
        """Copy weights in; then call `set_global_vars` if there are any.

        `version` (one, or one per policy) is stored with every step that these weights act in.
        Raises KeyError for an unknown id, before anything changes, and ValueError for weights that
        do not fit.
        """
        known = {policy_id: self._policy(policy_id) for policy_id in weights}
        for policy_id, policy in known.items():
            number = version if isinstance(version, int) else version.get(policy_id, -1)
            policy.set_weights(weights[policy_id], version=number)
        if global_vars:
            self.set_global_vars(global_vars)

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Store global variables and pass them to all policies; `timestep` sets their schedules."""
        for policy in self.policies.values():
            policy.on_global_var_update(global_vars)
        self.global_vars = dict(global_vars)

    def get_global_vars(self) -> dict[str, Any]:
        """A copy of the variables set last; empty before that."""
        return dict(self.global_vars)

    def _policy(self, policy_id: str) -> TrainablePolicy:
        if policy_id not in self.policies:
            raise KeyError(f"no policy {policy_id!r}; the policies are {sorted(self.policies)}")
        return self.policies[policy_id]

    # choosing the rows to learn from

    def _shares(
        self,
        samples: AnyBatch,
        *,
        expected: int | None = None,
        epochs: int = 1,
        minibatch: int | None = None,
    ) -> dict[str, SampleBatch]:
        """The rows that each trained policy learns from, in the order of the ids.

        Raises ValueError on every rank unless all ranks have the same number of rows for each.
        """
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

    def _trainable(self, samples: AnyBatch) -> dict[str, SampleBatch]:
        """The batches of policies that are trained."""
        if not isinstance(samples, MultiAgentBatch):
            return {self._only(): _plain(samples)}
        return {
            policy_id: _plain(rows)
            for policy_id, rows in sorted(samples.policy_batches.items())
            if self._policy(policy_id) and policy_id in self.policies_to_train and rows.count
        }

    def _only(self) -> str:
        """The default policy's id, or the only policy's. Raises ValueError without either."""
        if DEFAULT_POLICY in self.policies:
            return DEFAULT_POLICY
        if len(self.policies) == 1:
            return next(iter(self.policies))
        raise ValueError(
            f"expected {_MULTI_AGENT}, because there are the policies {sorted(self.policies)}"
        )

    # gradients

    def compute_gradients(self, samples: AnyBatch) -> tuple[Any, dict[str, Any]]:
        """The gradients of a batch, without applying them.

        For one policy: (gradients, info with `batch_count`). For several: (policy id -> gradients,
        {"info": policy id -> info, "batch_count": env steps}) of the trained policies.
        """
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
        """Take one optimizer step.

        `gradients`: a mapping by policy id, including policies that are not trained here, or a list
        for the default policy. Raises ValueError unless numbers and shapes match the parameters.
        """
        if isinstance(gradients, Mapping):
            for policy_id in gradients:
                self._policy(policy_id)
            for policy_id, mine in gradients.items():
                self.policies[policy_id].apply_gradients(mine)
        else:
            self.policies[self._only()].apply_gradients(gradients)

    def learn_on_batch(self, samples: AnyBatch) -> dict[str, Any]:
        """Take one gradient step on a batch.

        Returns the info of one policy, with `learner_stats`; for several, policy id -> info of the
        trained ones. The names are the same for every batch. If it has no row to learn from,
        nothing changes, `batch_count` is 0 and the statistics are NaN.
        """
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
        may be shorter; size None or 0 means the whole batch. Returns (statistics averaged over the
        last epoch's minibatches, steps sampled); NaN statistics and 0 steps if an input has
        nothing. Raises ValueError if the number of steps is not the expected one.
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
        """Join a group of `world_size` workers that learn together.

        From now on `learn_on_batch` and `compute_gradients` use the mean of all ranks' gradients.
        Every rank has to call them equally often, with the same number of rows for each trained
        policy; otherwise all ranks raise ValueError. Starts with the weights of rank 0.

        `url` is torch.distributed's init_method, e.g. "tcp://127.0.0.1:29500". Raises ValueError
        for a policy that is not a torch policy, for a rank outside the world, and on every rank if
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
        """Plain copies of the filters, with their observations that were not merged yet.

        `flush_after` clears these observations here, so that a driver that merges the copies never
        counts them twice.
        """
        return {name: _copied(one, flush=flush_after) for name, one in self.filters.items()}

    def sync_filters(self, new_filters: Mapping[str, MeanStdFilter | NoFilter]) -> None:
        """Copy these filters, buffers included. Raises ValueError if one is missing."""
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
        """Call `func` with every copy, in order; any env that is not a vector is one copy."""
        return [func(env) for env in self._live().sub_environments()]

    def get_policy(self, policy_id: str = DEFAULT_POLICY) -> TrainablePolicy | None:
        """The policy; None for an unknown id."""
        return self.policies.get(policy_id)

    def for_policy(
        self, func: Callable[[TrainablePolicy], Any], policy_id: str = DEFAULT_POLICY
    ) -> Any:
        """Call `func` with one policy. Raises KeyError for an unknown id."""
        return func(self._policy(policy_id))

    def foreach_policy(self, func: Callable[[TrainablePolicy, str], Any]) -> list[Any]:
        """Call `func(policy, policy id)` for every policy, in the order of `policies`."""
        return [func(policy, policy_id) for policy_id, policy in self.policies.items()]

    def foreach_trainable_policy(self, func: Callable[[TrainablePolicy, str], Any]) -> list[Any]:
        """Call `func(policy, policy id)` for every policy to train."""
        return [func(self.policies[name], name) for name in self.policies_to_train]

    # state

    def save(self) -> bytes:
        """The worker's state as safetensors, which `restore` reads without executing anything.

        It contains filters with observations that were not merged yet (which are cleared here),
        weights, optimizers, global variables and random state. See policy.worker.state.
        """
        filters = {
            name: one
            for name, one in self.get_filters(flush_after=True).items()
            if isinstance(one, MeanStdFilter)
        }
        rng = dict(self.worker_rng.bit_generator.state)
        return pack(self.policies, filters, global_vars=self.global_vars, rng=rng)

    def save_to(self, path: Path | str) -> Path:
        """Write the result of `save` to a file, atomically and durably; return its path."""
        return write_bytes(path, self.save())

    def restore(self, data: bytes) -> None:
        """Continue from the result of `save`; episodes in progress are not affected.

        Raises WeightsDamaged for damaged bytes, and ValueError for another worker's state; then
        nothing has changed.
        """
        body, tensors = unpack(data)
        check_fits(body, self.policies)
        filters = {
            one["id"]: filter_from_json(
                one["filter"], self.policies[one["id"]].spec.flattener.features
            )
            for one in body["policies"].values()
            if one["filter"] is not None
        }
        for place, document in body["policies"].items():
            policy = self.policies[document["id"]]
            restore_policy(policy, document, named(tensors, place))
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
        """Write the network for other programs: torch.export, or ONNX with the [export] extra."""
        export = export_onnx if onnx else export_model
        return export(self._policy(policy_id), directory)

    def export_policy_checkpoint(
        self, directory: Path | str, prefix: str = "model", policy_id: str = DEFAULT_POLICY
    ) -> Path:
        """Write the state_dict as safetensors, with the spec in a second file; return its path."""
        return export_checkpoint(self._policy(policy_id), directory, prefix)

    def import_policy_model_from_h5(self, *args: Any, **kwargs: Any) -> None:
        """Always raises NotImplementedError, which names the replacement: it needs TensorFlow."""
        name = "import_policy_model_from_h5"
        raise NotImplementedError(f"{name}: {DROPPED[name]}")

    # other methods

    def apply(self, func: Callable[[Any], Any]) -> Any:
        """Call `func(worker)`; a group uses this on remote workers."""
        return func(self)

    def creation_args(self) -> dict[str, Any]:
        """The constructor's arguments as they were passed."""
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

        Raises ImportError, which names the [ray] extra, if Ray is not installed.
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
        """The address of this machine for other machines."""
        return get_node_ip()

    def find_free_port(self) -> int:
        """A TCP port of this machine that is free now."""
        return find_free_port()

    def stop(self) -> None:
        """Close environments, input and output, and leave a data-parallel group; safe to repeat."""
        if getattr(self, "_stopped", True):
            return
        self._stopped = True
        if self._sampling is not None:
            self._sampling.close()
        if any(policy.world_size > 1 for policy in self.policies.values()):
            leave_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _copied(one: MeanStdFilter | NoFilter, *, flush: bool) -> MeanStdFilter | NoFilter:
    if not isinstance(one, MeanStdFilter):
        return one
    return one.take_buffer() if flush else one.as_serialisable()


def _mean(values: Sequence[float]) -> float:
    """The mean over minibatches with rows to learn from; NaN stands for one without."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def _plain(batch: SampleBatch) -> SampleBatch:
    """A copy of the batch in which columns packed by `compress_observations` are unpacked."""
    return batch.copy(shallow=True).decompress_if_needed()


def standardised(batch: SampleBatch, fields: Sequence[str]) -> SampleBatch:
    """The batch with the named fields standardised, in new columns; the others are shared."""
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
