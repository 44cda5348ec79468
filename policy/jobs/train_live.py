"""The training job of live, on-policy clients: follows the shards and publishes after each update.

    follow("run", "default", PPOConfig(), stop=lambda: return_is_high_enough)

The initial weights are published before the first row is read, so that clients can act. From then
on an update is made as soon as `steps_per_update` fresh steps of a client's own policy have been
read, and its weights go live at once. Rows that the algorithm can't use (an abandoned episode's
last one) count towards that number, because a collector that holds its clients counted them too.
When the collector says that it holds them (storage.declarations.held_policies), an update is made
with what can be read: a damaged shard must not stop learning. Where no collector says anything, it
is made once a shard was left out and nothing came for a while.

A checkpoint holds weights, optimizer, schedules, random state, counts, lineage and the reader's
position in one file, and is durable before its version goes live (policy.jobs.follower_state):
after a kill the job goes on from it, and no row is trained on twice in what its weights have behind
them. One follower of a policy runs at a time, by a lease (storage.weights.lease). What the file
system refuses for now, as on a full disk, is tried again without end.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.jobs.checkpoint_files import CheckpointFiles
from policy.jobs.follower_state import FollowerState, FollowerStateSettings, OnConflict, OutOfTurn
from policy.jobs.retrying import Retrying, Stopped
from policy.jobs.schemas import schema_to_read
from policy.jobs.train import acting_spec, declared_spec
from policy.networks.policy import Policy
from storage.declarations.held_policies import held_version
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.sample_batch import EPS_ID, POLICY_VERSION, SampleBatch, concat_samples
from storage.reading.loading import ROW
from storage.reading.shard_reader import Reserve, ShardReader
from storage.weights.lease import Lease

__all__ = ["FollowResult", "follow", "set_flow_control"]

log = logging.getLogger("headrace.trainer")

KEEP_VERSIONS = 32
_WAIT = 0.1  # s, how often `stop` is asked while nothing arrives
_REFUSED_SECONDS = 5.0  # from an update to the next one, while a collector does not take up ours
_QUIET_SECONDS = 10.0  # without a row since a shard was left out: whoever waits for it waits for us
_OWN = ("_at", ROW)  # columns that no algorithm knows

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class FollowResult:
    """What the job has behind it, over all resumed runs; rows are steps."""

    policy_id: str
    version: int  # live at the end, -1: none
    updates: int
    rows_read: int
    rows_trained: int
    excluded: Mapping[str, int] = field(default_factory=dict)  # why -> rows
    excluded_shards: Mapping[str, str] = field(default_factory=dict)  # path -> why, in this run
    retrying: Mapping[str, str] = field(default_factory=dict)  # path -> what it failed with last
    conflicts: int = 0  # times that somebody else made another version live meanwhile, in this run
    ended: str = "stopped"  # or "conflict"


def follow(
    root: Path | str,
    policy_id: str = DEFAULT_POLICY,
    config: AlgorithmConfig | None = None,
    *,
    stop: Callable[[], bool],
    spec: PolicySpec | None = None,
    steps_per_update: int = 256,
    max_lag: int | None = None,
    evaluation_share: float = 0.0,
    cluster: str = "",
    publish: bool = True,
    checkpoint_dir: Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = True,
    keep_versions: int = KEEP_VERSIONS,
    on_update: Callable[[Metrics], None] | None = None,
    tensorboard: Path | None = None,
    seed: int = 0,
    threads: int = 1,
    on_conflict: OnConflict = "reload",
    lease_wait: float = 0.0,
) -> FollowResult:
    """Train on what clients do, until `stop()`, which is asked between reads.

    `config` defaults to `PPOConfig()`, `spec` to the declared one. Rows that lag behind the live
    version by more than `max_lag` are left out as "stale". An update takes `steps_per_update` fresh
    steps, or fewer when a collector holds the policy and nothing more can be read.

    `evaluation_share` of the episodes (see `policy.jobs.train.train`) count towards an update, and
    are left out of it as "reserved"; none by default, because on-policy versions go live unjudged.

    Checkpoints lie under `checkpoint_dir` (default `weights/{id}/checkpoints`). With `resume`, the
    job goes on from the latest that is whole; without one, from the weights that are live. Every
    `checkpoint_every` updates versions beyond the newest `keep_versions` are removed. Without
    `publish`, and while a rollback pins the policy, a candidate is kept so often and none is live.

    `lease_wait` is how many seconds to wait for another follower's end. When somebody else
    publishes or rolls back, the job goes on from those weights, or ends: `on_conflict`.
    `tensorboard` is a directory for its event files. `threads` are torch's.

    `on_update` gets the algorithm's metrics and `update, version, rows, rows_trained, seconds,
    publish_seconds, policy_lag_mean, policy_lag_max`: versions behind the live one (nan: unknown).

    Raises ValueError for what does not fit, LeaseHeld while another follower trains the policy.
    """
    torch.set_num_threads(threads)
    reserve = Reserve(evaluation_share, cluster)
    settings = _Settings(steps_per_update, max_lag, reserve)
    leaving = FollowerStateSettings(publish, checkpoint_every, keep_versions, on_conflict, reserve)
    config = config or PPOConfig()
    wanted = acting_spec(spec or _declared(root, policy_id), config)
    folder = checkpoint_dir or Path(root) / "weights" / policy_id / "checkpoints"
    with ExitStack() as stack:
        store = WeightStore(root, policy_id)
        try:
            lease = _lease(store, lease_wait, stop)
        except Stopped:
            return FollowResult(
                policy_id=policy_id, version=-1, updates=0, rows_read=0, rows_trained=0
            )
        stack.callback(lease.release)
        tell = [_event_log(tensorboard, stack), *([on_update] if on_update else [])]
        reader = stack.enter_context(_reader(root, policy_id, config, settings))
        learner = Learner(Policy(wanted, seed=seed), config, seed=seed)
        files, retrying = CheckpointFiles(folder, lease.fence), Retrying(stop, lease.check)
        state = FollowerState(learner, reader, store, files, lease, retrying, leaving)
        held = partial(held_version, Path(root), policy_id)
        job = _Follower(learner, reader, state, held, settings)
        ended = _run(job, state, lease, stop, tell, resume=resume)
        return job.result(policy_id, ended)


def _run(
    job: _Follower,
    state: FollowerState,
    lease: Lease,
    stop: Callable[[], bool],
    tell: Sequence[Callable[[Metrics], None]],
    *,
    resume: bool,
) -> str:
    """Update until `stop()` or a conflict that ends it; which of them it was."""
    try:
        state.begin(resume=resume)
        while not stop():
            lease.check()
            if (metrics := job.advance(_WAIT)) is not None:
                for listener in tell:
                    listener(metrics)
            lease.report(job.status())
        state.end()
    except OutOfTurn as conflict:
        log.warning("ended: %s", conflict)
        return "conflict"
    except Stopped as waited:
        log.warning("stopped while something was waited for, and not saved: %s", waited)
    return "stopped"


def _lease(store: WeightStore, wait: float, stop: Callable[[], bool]) -> Lease:
    """The policy's lease, which only one follower has at a time. Raises LeaseHeld."""
    take = partial(Lease.take, store.directory, wait=wait, stop=stop)
    return Retrying(stop).do("taking the lease", take)


def set_flow_control(
    root: Path | str,
    policy_id: str = DEFAULT_POLICY,
    *,
    steps_per_version: int | None,
    max_policy_lag: int | None,
) -> None:
    """Write into `policies/{id}.json` when its collector holds clients; None switches it off.

    Raises ValueError when the policy is not declared.
    """
    declared = load_declarations(Path(root)).get(policy_id)
    if declared is None:
        raise ValueError(f"{root}: expected policies/{policy_id}.json, found none")
    changed = replace(declared, steps_per_version=steps_per_version, max_policy_lag=max_policy_lag)
    if changed != declared:
        save_declaration(Path(root), changed)


@dataclass(frozen=True)
class _Settings:
    """When an update is made, and of what."""

    steps_per_update: int
    max_lag: int | None
    reserve: Reserve

    def __post_init__(self) -> None:
        if self.steps_per_update < 1:
            raise ValueError(f"steps_per_update: expected 1 or more, got {self.steps_per_update!r}")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_lag: expected 0 or more, or None, got {self.max_lag!r}")


class _Follower:
    """The loop: rows gathered for the next update, and when that is due."""

    def __init__(
        self,
        learner: Learner,
        reader: ShardReader,
        state: FollowerState,
        held: Callable[[], int | None],
        settings: _Settings,
    ) -> None:
        self._learner, self._reader, self._state = learner, reader, state
        self._held = held
        self._settings = settings
        self._updated = time.monotonic()  # the latest update
        self._clear()

    def _clear(self) -> None:
        self._gathered: list[SampleBatch] = []
        self._left_out: Counter[str] = Counter()
        self._fresh = 0
        self._came = time.monotonic()  # the latest of them

    def advance(self, timeout: float) -> Metrics | None:
        """Read what is there, waiting `timeout` seconds; the metrics if that made an update."""
        # no more than the next update takes: the rest stays in the reader, whose position names it
        self._reader.batch_size = self._settings.steps_per_update - self._fresh
        batch = self._reader.next(timeout)
        if batch.count:
            self._gather(batch)
            return self._update() if self._fresh >= self._settings.steps_per_update else None
        return self._update() if self._due() else None

    def _gather(self, batch: SampleBatch) -> None:
        mine = np.asarray(batch["source"] == "on_policy", np.bool_)
        stale = mine & self._stale(batch[POLICY_VERSION])
        reserved = self._settings.reserve.rows(batch)
        stale &= ~reserved
        leave = stale | reserved
        batch["_at"] = np.arange(batch.count)
        used, left_out = self._learner.usable(batch.take(~leave) if leave.any() else batch)
        trained = np.zeros(batch.count, np.bool_)
        trained[used["_at"] if used.count else []] = True
        self._state.untrained.read(batch, trained)
        self._gathered.append(used)
        own = {"stale": int(stale.sum()), "reserved": int(reserved.sum())}
        self._left_out.update({**left_out, **{why: n for why, n in own.items() if n}})
        self._fresh += int(mine.sum())  # as the collector counts, which holds clients by it
        if mine.any():
            self._came = time.monotonic()

    def _due(self) -> bool:
        """Whether clients wait for a version, and all that can be read for it was read.

        Rows that were counted and cannot be read (damaged, vanished, left out) are not waited for.
        What was closed by then is in shards when the collector says that it holds.
        """
        if (self._state.pinned or not self._state.publishes) and not self._gathered:
            return False  # whoever publishes lets clients go on; a pin holds nobody
        held = self._held()
        if held is not None and not self._is_waited_for(held):
            return False
        if held is None and not self._is_quiet():
            return False
        if not self._reader.caught_up():
            return False
        why = f"version {held} is held" if held is not None else "shards are left out, no row comes"
        log.warning(
            "%s and everything that can be read was read: updating with %d of %d steps; left out "
            "so far: %s; tried again: %d shards",
            why,
            self._fresh,
            self._settings.steps_per_update,
            self._state.excluded() or "none",
            len(self._reader.stats.retrying),
        )
        return True

    def _is_waited_for(self, held: int) -> bool:
        """Whether clients of that version wait for our next one.

        Those of a version before ours are about to get ours, unless their collector refuses it; one
        that is later and not live is of weights that a backup took the place of.
        """
        mine = self._learner.policy.version
        if held == mine or (held > mine and self._state.is_live(held)):
            return True
        if time.monotonic() - self._updated < _REFUSED_SECONDS:
            return False
        return held > mine or self._state.is_refused()

    def _is_quiet(self) -> bool:
        """Whether no row of clients that act has come for long, and some were left out."""
        spoiled = self._reader.stats.spoiled > self._state.spoiled
        return spoiled and time.monotonic() - self._came >= _QUIET_SECONDS

    def _update(self) -> Metrics:
        begin = time.perf_counter()
        read, left_out = concat_samples(self._gathered), self._left_out
        used = read.select([name for name in read if name not in _OWN])
        self._clear()
        self._state.note_live()
        lag = self._lag(used)
        metrics = {**self._learner.learn(used, left_out), **lag}
        if metrics["rows"] < used.count:  # taken back
            self._state.untrained.read(read, np.zeros(read.count, np.bool_))
        learned = time.perf_counter()
        counts = self._learner.counts
        metrics |= {"update": counts.updates, "rows_trained": counts.rows_trained}
        self._state.leave(metrics)
        self._updated = time.monotonic()
        return {
            **metrics,
            "version": self._learner.policy.version,
            "publish_seconds": time.perf_counter() - learned,
            "seconds": time.perf_counter() - begin,
        }

    def _stale(self, versions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """(N,) acted on by a version that is too old, or not known."""
        if self._settings.max_lag is None:
            return np.zeros(len(versions), np.bool_)
        oldest = max(0, self._learner.policy.version - self._settings.max_lag)
        return np.asarray(versions < oldest, np.bool_)

    def _lag(self, used: SampleBatch) -> Metrics:
        versions = used[POLICY_VERSION] if used.count else np.zeros(0, np.int64)
        lag = self._learner.policy.version - versions[versions >= 0]
        known = self._learner.policy.version >= 0 and len(lag) > 0
        return {
            "policy_lag_mean": float(lag.mean()) if known else float("nan"),
            "policy_lag_max": float(lag.max()) if known else float("nan"),
        }

    # what it says

    def status(self) -> dict[str, Any]:
        """For the lease's record, which the collector's metrics show."""
        counts, stats = self._learner.counts, self._reader.stats
        return {
            "version": self._learner.policy.version,
            "updates": counts.updates,
            "rows_trained": counts.rows_trained,
            "excluded": self._state.excluded(),
            "excluded_shards": len(stats.excluded_shards),
            "retrying": len(stats.retrying),
            "conflicts": self._state.conflicts,
            "pinned": self._state.pinned,
        }

    def result(self, policy_id: str, ended: str) -> FollowResult:
        counts, stats = self._learner.counts, self._reader.stats
        return FollowResult(
            policy_id=policy_id,
            version=self._learner.policy.version,
            updates=counts.updates,
            rows_read=counts.rows_read,
            rows_trained=counts.rows_trained,
            excluded=self._state.excluded(),
            excluded_shards=dict(stats.excluded_shards),
            retrying=dict(stats.retrying),
            conflicts=self._state.conflicts,
            ended=ended,
        )


def _declared(root: Path | str, policy_id: str) -> PolicySpec:
    found = declared_spec(Path(root), policy_id)
    if found is None:
        raise ValueError(f"{root}: expected policies/{policy_id}.json or a spec, found neither")
    return found


def _reader(
    root: Path | str, policy_id: str, config: AlgorithmConfig, settings: _Settings
) -> ShardReader:
    columns = (*config.columns, "source", EPS_ID, POLICY_VERSION, ROW, *settings.reserve.columns)
    return ShardReader(
        root,
        policy_id=policy_id,
        schema_id=schema_to_read(root, policy_id),
        mode="fragments",
        batch_size=settings.steps_per_update,
        follow=True,
        eager=True,  # an update may be due with fewer rows than it takes
        columns=tuple(dict.fromkeys(columns)),
    )


def _event_log(folder: Path | None, stack: ExitStack) -> Callable[[Metrics], None]:
    """Writes metrics over `rows_trained` as TensorBoard reads them; nothing without a folder."""
    if folder is None:
        return lambda metrics: None
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise ImportError("tensorboard=: expected the package tensorboard, found none") from error
    writer = SummaryWriter(str(folder))
    stack.callback(writer.close)

    def log(metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(f"train/{name}", value, int(metrics["rows_trained"]))

    return log
