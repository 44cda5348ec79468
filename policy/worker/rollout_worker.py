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

docs/workers.md tells every argument. As a Ray actor: `RolloutWorker.as_remote(num_cpus=1)`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from policy.algorithms.data_parallel import find_free_port, get_node_ip, leave_group
from policy.algorithms.trainable_policy import TrainablePolicy
from policy.envs.env_runner import EnvRunner
from policy.inference.filters import MeanStdFilter, NoFilter
from policy.networks.export import export_checkpoint, export_model, export_onnx
from policy.sampling.callbacks import make_callbacks
from policy.sampling.metrics import MetricsRecorder, OffPolicyEstimate, RolloutMetrics
from policy.worker.env_creation import EnvMaker, env_spaces, is_multi_agent
from policy.worker.input_evaluation import SIMULATION, InputEvaluation, check_methods
from policy.worker.learning import Batch, WorkerLearning
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
from storage.spaces.descriptors import Space

__all__ = ["RolloutWorker"]

Filters = dict[str, MeanStdFilter | NoFilter]


class RolloutWorker(WorkerLearning, EnvRunner):
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
        self.global_vars = {}
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
        self.maker, self.env = None, None
        if self.settings.env_creator is not None:
            self.maker = EnvMaker.of(self.settings)
            self.env = self.maker(0)

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
        """Raise RuntimeError for a worker that was stopped or has nothing to sample from."""
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

        truncate_episodes: rollout_fragment_length * num_envs steps (fewer when postprocessing
        takes rows away), of at most num_envs batches of the input. complete_episodes: whole
        episodes, at least that many steps. Raises EndOfInput, EnvFailed, what environments raise
        that are not to be mended, and TypeError for any argument.
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

    # filters

    @property
    def filters(self) -> Filters:
        """Each policy's own filter."""
        return {policy_id: policy.filter for policy_id, policy in self.policies.items()}

    def get_filters(self, flush_after: bool = False) -> Filters:
        """Plain copies with what they have not handed over; `flush_after` clears that here, so that
        a driver that merges it never counts it twice."""
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
        """Filters with what they have not handed over (which is cleared here), weights, optimizers,
        global variables, random state: safetensors, nothing that is executed. See
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
        """`func(worker)`: what a group asks of a worker elsewhere."""
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
