"""A worker's sampler, input and output, and how a sample is collected from them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from policy.algorithms.ppo import ADVANTAGES
from policy.envs.base_env import BaseEnv
from policy.envs.env_runner import Restarts
from policy.envs.vector_env import Copies, LocalCopies, ProcessCopies
from policy.sampling.base_env_sampler import BaseEnvSampler
from policy.sampling.callbacks import Callbacks
from policy.sampling.episode import RolloutEpisode, SamplingWorker
from policy.sampling.metrics import MetricsRecorder
from policy.sampling.postprocessing import RowFinisher, alike, finish_read
from policy.sampling.sampler import Sampler
from policy.sampling.vector_sampler import VectorSampler
from policy.worker.batch_io import (
    AsyncSamplerInput,
    FakeInput,
    IOContext,
    NoopOutput,
    SamplerInput,
)
from policy.worker.env_creation import (
    CopyMaker,
    EnvMaker,
    base_env_of,
    is_atari,
    is_multi_agent,
    seed_of,
    single_agent,
    time_limit,
)
from policy.worker.input_evaluation import SIMULATION, InputEvaluation
from policy.worker.settings import WorkerSettings
from storage.experience.episode import policy_of_id
from storage.experience.interfaces import InputReader, OutputWriter
from storage.experience.multi_agent_batch import AnyBatch, MultiAgentBatch
from storage.experience.sample_batch import OBS, SampleBatch, concat_samples
from storage.wording import counted

_log = logging.getLogger("headrace.worker")

_MOST_EMPTY = 10
"""Batches without rows, one after the other and for each copy, after which a sample ends."""


class WorkerParts(SamplingWorker, Protocol):
    """The attributes and methods of a `RolloutWorker` that its sampling uses."""

    settings: WorkerSettings
    policy_of: Callable[[Any, RolloutEpisode], str]
    callbacks: Callbacks
    recorder: MetricsRecorder
    restarts: Restarts
    worker_rng: np.random.Generator

    def _try_env_step(self, action: Any, *, copy: Any = 0) -> Any: ...
    def _try_env_reset(
        self, *, copy: Any = 0, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]: ...
    def _restart(self, copy: Any, error: Exception) -> None: ...


def join_batches(batches: Sequence[Any]) -> AnyBatch:
    """Join batches to one; batches of several policies are joined by policy."""
    if any(isinstance(batch, MultiAgentBatch) for batch in batches):
        return MultiAgentBatch.concat_samples(list(batches))
    return concat_samples(alike(batches))


class Sampling:
    """Environments, sampler, input and output of one worker; `close` releases them."""

    def __init__(
        self,
        worker: WorkerParts,
        sampler: Sampler | None,
        copies: Copies | None,
        base: BaseEnv | None,
    ) -> None:
        self._worker, self._settings = worker, worker.settings
        self._copies, self._base = copies, base
        self._own = _own_input(self._settings, sampler)
        self.reader: InputReader | None = self._own
        self.output: OutputWriter = NoopOutput()
        self._failed: Exception | None = None
        self._empty: AnyBatch | None = None  # the last sample, without its rows
        self._warned = False  # of a sample without rows
        self._make_io()
        self._writing = threading.Lock()
        self._skipped: deque[SampleBatch] = deque()  # rows of episodes that learners are to skip
        simulated = SIMULATION in self._settings.input_evaluation and self.reader is not self._own
        self._simulation = Simulation(sampler) if simulated and sampler is not None else None
        if sampler is not None and not simulated:
            sampler.excluded = self._skip

    def _make_io(self) -> None:
        settings = self._settings
        given = {} if settings.log_dir is None else {"log_dir": settings.log_dir}
        context = IOContext(
            **given,
            config=dict(settings.policy_config),
            worker_index=settings.worker_index,
            worker=self._worker,
            sampler=self._own,
        )
        if settings.input_creator is not None:
            self.reader = settings.input_creator(context)
            if not isinstance(self.reader, InputReader):
                raise TypeError(
                    f"input_creator: expected an InputReader, got {type(self.reader).__name__}"
                )
            read = [one.settings.algorithm.columns for one in self._worker.policies.values()]
            if set(settings.input_evaluation) - {SIMULATION}:
                read.append(InputEvaluation.columns)
            self.reader.want(list(dict.fromkeys(name for names in read for name in names)))
        if settings.output_creator is not None:
            self.output = settings.output_creator(context)
            if not isinstance(self.output, OutputWriter):
                raise TypeError(
                    f"output_creator: expected an OutputWriter, got {type(self.output).__name__}"
                )

    @classmethod
    def of(cls, worker: WorkerParts) -> Sampling:
        """Create the environments, sampler, input and output that the worker's settings ask for."""
        if worker.env is None:
            return cls(worker, None, None, None)
        settings = worker.settings
        common: dict[str, Any] = {
            "finisher": _finisher(worker),
            "recorder": worker.recorder,
            "restarts": worker.restarts,
            "rng": worker.worker_rng,
            "clip_actions": settings.clip_actions,
            "explore": settings.explore,
        }
        if not single_agent(worker.env):
            base = base_env_of(settings, worker.env)
            made = BaseEnvSampler(
                base,
                worker.policies,
                worker.policy_of,
                settings.cut_rules(time_limit(worker.env)),
                observation_fn=settings.observation_fn,
                joint=is_multi_agent(worker.env),
                **common,
            )
            return cls(worker, made, None, base)
        copies = _copies(worker)
        policy_id, policy = next(iter(worker.policies.items()))
        rules = settings.cut_rules(time_limit(worker.env))
        return cls(worker, VectorSampler(copies, policy, policy_id, rules, **common), copies, None)

    # one sample

    def require_input(self) -> InputReader:
        """Raise RuntimeError for a worker with neither an environment nor an input."""
        if self.reader is None:
            raise RuntimeError(
                "sample: this worker has neither an env_creator nor an input_creator"
            )
        return self.reader

    def gather(self, least: int | None = None) -> AnyBatch:
        """Read the input's batches for one sample, of at least `least` steps if it is given.

        It has fewer steps, or no rows, if too many batches without rows come one after the other.
        """
        settings = self._settings
        if self.reader is None:
            raise RuntimeError("sample: this worker has no input")
        target = least or settings.rollout_fragment_length * settings.num_envs
        limited = settings.batch_mode == "truncate_episodes" and least is None
        most = settings.num_envs if limited else None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        own = self.reader is self._own
        batches: list[AnyBatch] = []
        steps = reads = empty = 0
        while steps < target and reads != most and empty < _MOST_EMPTY * settings.num_envs:
            try:
                batch = self._read()
            except Exception as error:
                if not batches:
                    raise
                # return the batches read so far, and raise the error at the next call
                self._failed = error
                break
            if batch.count or batch.agent_steps():
                batches.append(batch)
                steps, empty = steps + batch.count, 0
            elif own or not batches:  # another input may be slow: wait for the rest of a sample
                empty += 1
                if own and self._empty is None:
                    self._empty = batch
            reads += not own or batch.count > 0
        if not batches:
            return self._without_rows()
        joined = join_batches(batches)
        self._empty = joined.without_rows()
        return joined

    def _without_rows(self) -> AnyBatch:
        """A sample with the columns of the last one, or of the policies, and no rows."""
        if self.reader is self._own and not self._warned:
            self._warned = True
            _log.warning(
                "a sample without rows: every episode is excluded by training_enabled=False (so "
                "far %s), or postprocessing removes all rows",
                counted(self._worker.excluded["training_enabled"], "row"),
            )
        if self._empty is not None:
            return self._empty.copy()
        finisher, many = _finisher(self._worker), len(self._worker.policies) > 1
        empty = {name: finisher.no_rows(name, joint=many) for name in self._worker.policies}
        return MultiAgentBatch(empty, 0) if many else next(iter(empty.values()))

    def _read(self) -> AnyBatch:
        """Read the input's next batch, with the columns that the policies need."""
        if self.reader is None:
            raise RuntimeError("sample: this worker has no input")
        batch = self.reader.next()
        if self.reader is self._own:
            return batch
        policies = self._worker.policies
        if not isinstance(batch, MultiAgentBatch):
            return self._finish_read(policy_of_id(None, policies), batch)
        finished = {
            policy_id: self._finish_read(policy_id, rows)
            for policy_id, rows in batch.policy_batches.items()
        }
        return MultiAgentBatch(finished, batch.count)

    def _finish_read(self, policy_id: str, rows: SampleBatch) -> SampleBatch:
        """Complete rows from a reader in the same way as sampled rows.

        If the policy is trained, its filter learns from them.
        """
        policies = self._worker.policies
        if policy_id not in policies or not rows.count or ADVANTAGES in rows:
            return rows
        policy = policies[policy_id]
        if policy_id in self._worker.policies_to_train and rows.leaves(OBS):
            policy.filter.push(policy.spec.flattener.features_of(policy.flat_observations(rows)))
        return finish_read(policy, rows)

    def write(self, batch: AnyBatch) -> None:
        """Write a sample to the output, after the waiting rows of skipped episodes."""
        self._write_skipped()
        with self._writing:
            self.output.write(batch)

    def _skip(self, rows: SampleBatch) -> None:
        """Write rows that are not learned from; a sampling thread may call this, too."""
        self._worker.excluded["training_enabled"] += rows.count
        if isinstance(self.output, NoopOutput):
            return
        self._skipped.append(rows)
        # the next sample tries again, and raises the error that prevented the write
        with contextlib.suppress(Exception):
            self._write_skipped()

    def _write_skipped(self) -> None:
        with self._writing:
            while self._skipped:
                self.output.write(self._skipped[0])
                self._skipped.popleft()

    def simulate(self) -> None:
        """With input_evaluation "simulation": let the simulation play one episode per copy."""
        if self._simulation is not None:
            self._simulation.allow(self._settings.num_envs)

    # environments

    def sub_environments(self) -> list[Any]:
        """Every copy; an environment that cannot be divided is a single one."""
        if self._copies is not None:
            return list(self._copies.envs)
        if self._base is None:
            return []
        listed = getattr(self._base, "sub_environments", None)
        return list(listed()) if listed is not None else [self._worker.env]

    def env_at(self, copy: int) -> Any:
        return self._copies.envs[copy] if self._copies is not None else self._worker.env

    def remake(self, copy: int) -> None:
        """Replace a failed copy by a new one."""
        if isinstance(self._copies, ProcessCopies):
            self._copies.remake(copy)
        elif isinstance(self._copies, LocalCopies):
            # it has failed: errors of closing are not informative
            with contextlib.suppress(Exception):
                self._copies.envs[copy].close()
            self._copies.envs[copy] = EnvMaker.of(self._settings)(copy)

    def close(self) -> None:
        """Stop threads, then close input, output and environments."""
        if self._simulation is not None:
            self._simulation.close()
        for one in (self.reader, self._own, self.output):
            if one is not None:
                one.close()
        if self._copies is not None:
            self._copies.close()
        if self._base is not None:
            self._base.stop()


def _own_input(settings: WorkerSettings, sampler: Sampler | None) -> InputReader | None:
    if sampler is None:
        return None
    made: InputReader = (
        AsyncSamplerInput(sampler) if settings.sample_async else SamplerInput(sampler)
    )
    return FakeInput(made) if settings.fake_sampler else made


def _finisher(worker: WorkerParts) -> RowFinisher:
    settings = worker.settings
    clip = settings.clip_rewards
    if clip is None and settings.preprocessor_pref == "deepmind" and is_atari(worker.env):
        clip = "sign"
    return RowFinisher(
        worker.policies,
        worker.callbacks,
        clip,
        worker,
        lambda name: name in worker.policies_to_train,
    )


def _copies(worker: WorkerParts) -> Copies:
    """The copies of a gymnasium environment, in this process or one process each."""
    settings = worker.settings
    maker = EnvMaker.of(settings)
    seeds = [seed_of(settings, copy) for copy in range(settings.num_envs)]
    if not settings.remote_worker_envs:
        first: gym.Env[Any, Any] = worker.env
        envs = [first, *(maker(i) for i in range(1, settings.num_envs))]
        return LocalCopies(
            envs, try_step=worker._try_env_step, try_reset=worker._try_env_reset, seeds=seeds
        )
    worker.env.close()  # it was only needed for its spaces
    return ProcessCopies(
        [CopyMaker(maker, i) for i in range(settings.num_envs)],
        restart=worker._restart,
        wait_ms=settings.remote_env_batch_wait_ms,
        seeds=seeds,
    )


class Simulation:
    """Plays the allowed number of episodes in a thread; only their metrics are stored."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._wanted: Queue[bool] = Queue()  # True: an episode; False: stop
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="simulation", daemon=True)
        self._thread.start()

    def allow(self, episodes: int) -> None:
        """Allow more episodes. Raises the error of an earlier episode."""
        if self._failed is not None:
            raise self._failed
        for _ in range(episodes):
            self._wanted.put(True)

    def _run(self) -> None:
        while self._wanted.get():
            try:
                if self._failed is None:
                    self._sampler.simulate(1)
            except BaseException as error:
                self._failed = error
            finally:
                self._wanted.task_done()

    def close(self) -> None:
        self._wanted.put(False)
        self._thread.join(timeout=5.0)
