"""On-policy training from live clients: follow the shards, and publish after each update.

    follow("run", "default", PPOConfig(), stop=lambda: return_is_high_enough)

The initial weights are published before the first row is read, so that clients can act. Then an
update is made whenever `steps_per_update` on-policy steps have been read, and its weights go live
at once. Rows that the algorithm cannot use (such as an abandoned episode's last one) count too,
because the collector's flow control also counts them. If a collector reports that it holds its
clients (storage.declarations.held_policies), the update uses the rows that can be read: a damaged
shard must not stop the training. Without such a report, this happens when a shard was left out and
no row has come for some time.

A checkpoint is one file with weights, optimizer, schedules, random state, counts, lineage and the
reader's position. It is durable before its version goes live (policy.training.follower_state).
After a kill the job resumes from it, and no row is trained on twice in the same chain of weights. A
lease (storage.weights.lease) allows one follower per policy. Operations that the file system
refuses, as on a full disk, are tried again without a limit.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig
from policy.data.schemas import schema_to_read
from policy.inference.finite import NOT_FINITE
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.tracking import TrackedRun, named
from policy.training.checkpoint_files import CheckpointFiles
from policy.training.follower_state import FollowerState, OutOfTurn
from policy.training.hints import Hints
from policy.training.retrying import Retrying, Stopped
from policy.training.settings import FollowSettings
from policy.training.train import acting_spec, declared_spec, new_policy
from storage.declarations.held_policies import held_version
from storage.declarations.policy_files import load_declarations
from storage.errors import WeightStoreError
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.sample_batch import EPS_ID, POLICY_VERSION, SampleBatch, concat_samples
from storage.objects.opening import Root, require_local
from storage.reading.holdout import Reserve
from storage.reading.loading import ROW
from storage.reading.shard_reader import ShardReader
from storage.weights.lease import Lease

log = logging.getLogger("headrace.trainer")

_WAIT = 0.1  # seconds between calls of `stop` while nothing arrives
_REFUSED_SECONDS = 5.0  # between updates while a collector does not serve the latest version
_QUIET_SECONDS = 10.0  # without new rows after a shard was left out, before an update is made
_OWN = ("_at", ROW)  # columns of this module, removed before training

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class FollowResult:
    """The result of `follow`, over all resumed runs unless a comment says otherwise.

    Rows are steps.
    """

    policy_id: str
    version: int = -1  # live at the end; -1: none
    updates: int = 0
    rows_read: int = 0
    rows_trained: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict)  # reason -> rows
    excluded_shards: Mapping[str, str] = field(default_factory=dict)  # path -> reason, in this run
    retrying: Mapping[str, str] = field(default_factory=dict)  # path -> the latest error
    conflicts: int = 0  # versions that other processes made live, in this run
    ended: str = "stopped"  # or "conflict"


def follow(
    root: Root,
    policy_id: str = DEFAULT_POLICY,
    config: AlgorithmConfig | None = None,
    settings: FollowSettings | None = None,
    *,
    stop: Callable[[], bool],
    spec: PolicySpec | None = None,
    on_start: Callable[[int], None] | None = None,
    on_update: Callable[[Metrics], None] | None = None,
    run: TrackedRun | None = None,
) -> FollowResult:
    """Train on clients' steps as they arrive, until `stop()`, which is called between reads.

    - `config` defaults to `PPOConfig()`, `spec` to the declared, the live or a default one.
    - `on_start` is called with the version that is live (-1: none) when the job begins to read.
    - `on_update` is called with the algorithm's metrics and `update`, `version`, `rows`,
      `rows_trained`, `seconds`, `publish_seconds`, `policy_lag_mean` and `policy_lag_max` (in
      versions; nan: unknown). `run` gets the same metrics, by `rows_trained`.

    Raises ValueError for invalid arguments, LeaseHeld while another follower trains the policy.
    """
    settings = settings or FollowSettings()
    torch.set_num_threads(settings.threads)
    reserve = Reserve(settings.evaluation_share or 0.0, settings.cluster or "")
    config = config or PPOConfig()
    wanted = acting_spec(spec or _declared(root, policy_id), config)
    folder = Path(settings.checkpoint_dir or _checkpoints(root, policy_id))
    with ExitStack() as stack:
        store = WeightStore(root, policy_id)
        try:
            lease = _lease(store, settings.lease_wait, stop)
            stack.callback(lease.release)
            if spec is None and settings.resume:
                wanted = _live_spec(root, store, wanted, Retrying(stop, lease.check))
        except Stopped:
            return FollowResult(policy_id=policy_id)
        reader = stack.enter_context(_reader(root, policy_id, config, settings, reserve))
        learner = Learner(new_policy(wanted, settings.seed), config, seed=settings.seed)
        files, retrying = CheckpointFiles(folder, lease.fence), Retrying(stop, lease.check)
        state = FollowerState(learner, reader, store, files, lease, retrying, settings)
        held = partial(held_version, root, policy_id)
        job = _Follower(learner, reader, state, held, settings, reserve, run)

        def begin() -> None:
            state.begin(resume=settings.resume)
            if on_start is not None:
                on_start(learner.policy.version)

        ended = _run(job, state, lease, stop, on_update, begin)
        return job.result(policy_id, ended)


def _run(
    job: _Follower,
    state: FollowerState,
    lease: Lease,
    stop: Callable[[], bool],
    on_update: Callable[[Metrics], None] | None,
    begin: Callable[[], None],
) -> str:
    """Update until `stop()`, or until a conflict ends the job; return "stopped" or "conflict"."""
    try:
        begin()
        while not stop():
            lease.check()
            metrics = job.advance(_WAIT)
            if metrics is not None and on_update is not None:
                on_update(metrics)
            lease.report(job.status())
        state.end()
    except OutOfTurn as conflict:
        log.warning("ended: %s", conflict)
        return "conflict"
    except Stopped as waited:
        log.warning("stopped during a retry, without a checkpoint: %s", waited)
    return "stopped"


def _lease(store: WeightStore, wait: float, stop: Callable[[], bool]) -> Lease:
    """Take the policy's lease, which only one follower has at a time. Raises LeaseHeld."""
    take = partial(Lease.take, store.files, wait=wait, stop=stop)
    return Retrying(stop).do("taking the lease", take)


class _Follower:
    """Gathers rows for the next update, and decides when it is due."""

    def __init__(
        self,
        learner: Learner,
        reader: ShardReader,
        state: FollowerState,
        held: Callable[[], int | None],
        settings: FollowSettings,
        reserve: Reserve,
        run: TrackedRun | None,
    ) -> None:
        self._run, self._noted = run, {"run": run.uri} if run else {}
        self._learner, self._reader, self._state = learner, reader, state
        self._held = held
        self._settings, self._reserve = settings, reserve
        self._hints = Hints()
        learner.warns = False  # the hints say what is left out
        self._updated = time.monotonic()  # the latest update
        self._clear()

    def _clear(self) -> None:
        self._gathered: list[SampleBatch] = []
        self._left_out: Counter[str] = Counter()
        self._fresh = 0
        self._came = time.monotonic()  # the latest on-policy row

    def advance(self, timeout: float) -> Metrics | None:
        """Read a batch, waiting up to `timeout` seconds; return metrics if an update was made."""
        if not self._gathered:
            self._state.refill()
        # No more rows than the next update needs: others stay in the reader and its position.
        self._reader.batch_size = self._settings.steps_per_update - self._fresh
        batch = self._reader.next(timeout)
        if batch.count:
            self._gather(batch)
            return self._update() if self._fresh >= self._settings.steps_per_update else None
        return self._update() if self._due() else None

    def _gather(self, batch: SampleBatch) -> None:
        self._hints.read(batch)
        mine = np.asarray(batch["source"] == "on_policy", np.bool_)
        stale = mine & self._stale(batch[POLICY_VERSION])
        reserved = self._reserve.rows(batch)
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
        self._fresh += int(mine.sum())  # the collector's flow control counts the same rows
        if mine.any():
            self._came = time.monotonic()

    def _due(self) -> bool:
        """Whether clients wait for a version, and every readable row for it has been read.

        Rows that were counted but cannot be read (damaged, vanished, left out) are not waited for.
        The steps that the collector has counted are in shards when it reports that it holds.
        """
        if (self._state.pinned or not self._state.publishes) and not self._gathered:
            return False  # an update would not release clients: another process publishes
        held = self._held()
        if held is not None and not self._is_waited_for(held):
            return False
        if held is None and not self._is_quiet():
            return False
        if not self._reader.caught_up():
            return False
        held_text = f"clients of version {held} are held"
        why = held_text if held is not None else "shards are left out and no new rows come"
        log.warning(
            "%s, and everything that can be read was read: updating with %d of %d steps; left out "
            "so far: %s; shards to try again: %d",
            why,
            self._fresh,
            self._settings.steps_per_update,
            self._state.excluded() or "none",
            len(self._reader.stats.retrying),
        )
        return True

    def _is_waited_for(self, held: int) -> bool:
        """Whether clients of version `held` wait for this job's next version.

        Clients of an earlier version will get the current one, unless their collector refuses it. A
        later version that is not live belongs to weights that a restored backup has replaced.
        """
        mine = self._learner.policy.version
        if held == mine or (held > mine and self._state.is_live(held)):
            return True
        if time.monotonic() - self._updated < _REFUSED_SECONDS:
            return False
        return held > mine or self._state.is_refused()

    def _is_quiet(self) -> bool:
        """Whether shards were left out, and no on-policy row has come for `_QUIET_SECONDS`."""
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
        undone = metrics["rows"] < used.count
        self._hints.updated(
            int(metrics["rows"]), {**left_out, NOT_FINITE: used.count} if undone else left_out
        )
        if undone:
            self._state.untrained.read(read, np.zeros(read.count, np.bool_))
        learned = time.perf_counter()
        counts = self._learner.counts
        metrics |= {"update": counts.updates, "rows_trained": counts.rows_trained}
        self._state.leave({**metrics, **self._noted})
        self._updated = time.monotonic()
        metrics |= {
            "version": self._learner.policy.version,
            "publish_seconds": time.perf_counter() - learned,
            "seconds": time.perf_counter() - begin,
        }
        if self._run is not None:
            self._run.measure(named(metrics), int(metrics["rows_trained"]))
        return metrics

    def _stale(self, versions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """(N,) whether the acting version is too old or unknown."""
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

    # reporting

    def status(self) -> dict[str, Any]:
        """The status in the lease's record, which the collector's metrics show."""
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
            "hint": self._hints.text,
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


def _checkpoints(root: Root, policy_id: str) -> Path:
    return require_local(root, "checkpoint_dir") / "weights" / policy_id / "checkpoints"


def _declared(root: Root, policy_id: str) -> PolicySpec:
    found = declared_spec(root, policy_id)
    if found is None:
        raise ValueError(f"{root}: expected policies/{policy_id}.json or a spec, found neither")
    return found


def _live_spec(
    root: Root, store: WeightStore, declared: PolicySpec, retrying: Retrying
) -> PolicySpec:
    """The live version's spec, if only spaces are declared: defaults may differ between releases.

    The declared one if nothing is live, or something that does not fit or cannot be read.
    """
    declaration = load_declarations(root).get(store.policy_id)
    live = retrying.do("reading what is live", store.live)
    if live is None or declaration is None or declaration.spec is not None:
        return declared
    try:
        manifest = retrying.do("reading what is live", partial(store.manifest, live.version))
    except WeightStoreError:  # `FollowerState` goes on from another version
        return declared
    spec = PolicySpec.from_json(manifest.spec)
    fits = spec.schema_id == declared.schema_id and spec.action_rule == declared.action_rule
    return spec if fits else declared


def _reader(
    root: Root,
    policy_id: str,
    config: AlgorithmConfig,
    settings: FollowSettings,
    reserve: Reserve,
) -> ShardReader:
    columns = (*config.columns, *Hints.columns, "source", EPS_ID, POLICY_VERSION, ROW)
    columns = (*columns, *reserve.columns)
    return ShardReader(
        root,
        policy_id=policy_id,
        schema_id=schema_to_read(root, policy_id),
        mode="fragments",
        batch_size=settings.steps_per_update,
        follow=True,
        eager=True,  # an update may be due with fewer rows than `batch_size`
        columns=tuple(dict.fromkeys(columns)),
    )
