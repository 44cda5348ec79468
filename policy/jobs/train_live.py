"""The training job of live, on-policy clients: follows the shards and publishes after each update.

    follow("run", "default", PPOConfig(), stop=lambda: return_is_high_enough)

The initial weights are published before the first row is read, so that clients can act. From then
on an update is made as soon as `steps_per_update` fresh steps of a client's own policy have been
read, and its weights go live at once. Rows that the algorithm can't use (an abandoned episode's
last one) count towards that number, because a collector that holds its clients counted them too.

A checkpoint holds weights, optimizer, schedules, random state, counts, lineage and the reader's
position in one file: after a kill the job goes on from it, and no row is trained on twice in what
its weights have behind them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
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
from policy.jobs.train import declared_spec
from policy.networks.policy import Policy
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.errors import GenerationConflict
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.sample_batch import POLICY_VERSION, SampleBatch, concat_samples
from storage.reading.shard_reader import ShardReader
from storage.weights.manifest import finite

__all__ = ["CHECKPOINT", "FollowResult", "follow", "set_flow_control"]

CHECKPOINT = "follow.safetensors"
KEEP_VERSIONS = 32
_WAIT = 0.1  # s, how often `stop` is asked while nothing arrives

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
    conflicts: int = 0  # updates not published because somebody else published meanwhile


def follow(
    root: Path | str,
    policy_id: str = DEFAULT_POLICY,
    config: AlgorithmConfig | None = None,
    *,
    stop: Callable[[], bool],
    spec: PolicySpec | None = None,
    steps_per_update: int = 256,
    max_lag: int | None = None,
    publish: bool = True,
    checkpoint_dir: Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = True,
    keep_versions: int = KEEP_VERSIONS,
    on_update: Callable[[Metrics], None] | None = None,
    tensorboard: Path | None = None,
    seed: int = 0,
    threads: int = 1,
) -> FollowResult:
    """Train on what clients do, until `stop()`, which is asked between reads.

    `config` defaults to `PPOConfig()`, `spec` to the declared one. Rows acted on by a version older
    than the live one by more than `max_lag` are left out and counted as "stale". Every
    `checkpoint_every` updates, and at the end, the state is saved under `checkpoint_dir` (default
    `weights/{id}/checkpoints`), and versions beyond the newest `keep_versions` are removed.

    With `resume`, the job goes on from its checkpoint; where there is none, from the weights that
    are live and from what they were trained on. Without `publish`, a candidate is added with each
    checkpoint and nothing goes live. `tensorboard` is a directory for its event files (needs the
    package tensorboard). `threads` are torch's.

    `on_update` gets the algorithm's metrics and `update, version, rows, rows_trained, seconds,
    publish_seconds, policy_lag_mean, policy_lag_max`: the lag in versions behind the live one when
    the update began (nan when unknown).

    Raises ValueError for settings or stored weights that do not fit.
    """
    torch.set_num_threads(threads)
    settings = _Settings(
        steps_per_update, checkpoint_every, keep_versions, max_lag=max_lag, publish=publish
    )
    wanted = spec or _declared(root, policy_id)
    config = config or PPOConfig()
    folder = checkpoint_dir or Path(root) / "weights" / policy_id / "checkpoints"
    with ExitStack() as stack:
        tell = [_event_log(tensorboard, stack), *([on_update] if on_update else [])]
        reader = stack.enter_context(_reader(root, policy_id, config, steps_per_update))
        learner = Learner(Policy(wanted, seed=seed), config, seed=seed)
        store = WeightStore(root, policy_id)
        job = _Follower(learner, reader, store, folder / CHECKPOINT, settings)
        job.begin(resume=resume)
        while not stop():
            if (metrics := job.advance(_WAIT)) is not None:
                for listener in tell:
                    listener(metrics)
        job.end()
        return job.result()


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
    """What `follow` was asked for, checked."""

    steps_per_update: int
    checkpoint_every: int
    keep_versions: int
    max_lag: int | None
    publish: bool

    def __post_init__(self) -> None:
        for name in ("steps_per_update", "checkpoint_every", "keep_versions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)!r}")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_lag: expected 0 or more, or None, got {self.max_lag!r}")


class _Follower:
    """The job's state: rows gathered for the next update, and the position before them."""

    def __init__(
        self,
        learner: Learner,
        reader: ShardReader,
        store: WeightStore,
        checkpoint: Path,
        settings: _Settings,
    ) -> None:
        self._learner, self._reader, self._store = learner, reader, store
        self._checkpoint = checkpoint
        self._settings = settings
        self._conflicts = 0
        self._saved_at = -1  # updates
        self._position: dict[str, Any] = {}
        self._clear()

    def _clear(self) -> None:
        self._gathered: list[SampleBatch] = []
        self._left_out: Counter[str] = Counter()
        self._fresh = 0

    # the job

    def begin(self, *, resume: bool) -> None:
        """Find where to go on, and see to it that a version is live."""
        live = self._store.live()
        self._learner.policy.version = live.version if live else -1
        known = False
        if resume and self._checkpoint.exists():
            state = self._learner.load(self._checkpoint)
            self._learner.policy.version = live.version if live else -1
            self._saved_at = self._learner.counts.updates
            if state is not None:
                self._reader.load_state_dict(state)
            known = True
        elif resume and live is not None:
            self._go_on_from(live.version)
            known = True
        self._position = self._reader.state_dict()
        if self._settings.publish and not (known and live):
            self._publish({})

    def _go_on_from(self, version: int) -> None:
        policy = self._learner.policy
        manifest, weights = self._store.load(version)
        if manifest.spec != policy.spec.to_json():
            raise ValueError(
                f"{self._store.directory}: expected version {version}, which is live, to be of "
                f"this policy's spec, got another; pass its spec, or resume=False to replace it"
            )
        lineage = {name: ranges.to_json() for name, ranges in self._store.lineage(version).items()}
        self._learner.go_on_from(weights, lineage)
        policy.filter = Policy(policy.spec, filter_state=manifest.filter_state).filter
        policy.version = version
        self._reader.load_state_dict({**self._reader.state_dict(), "ledger": lineage})

    def advance(self, timeout: float) -> Metrics | None:
        """Read what is there, waiting `timeout` seconds; the metrics if that made an update."""
        # no more than the next update takes: the rest stays in the reader, whose position names it
        self._reader.batch_size = self._settings.steps_per_update - self._fresh
        batch = self._reader.next(timeout)
        if not batch.count:
            return None
        mine = np.asarray(batch["source"] == "on_policy", np.bool_)
        stale = mine & self._stale(batch[POLICY_VERSION])
        used, left_out = self._learner.usable(batch.take(~stale) if stale.any() else batch)
        self._gathered.append(used)
        self._left_out.update({**left_out, **({"stale": int(stale.sum())} if stale.any() else {})})
        self._fresh += int(mine.sum())  # as the collector counts, which holds clients by it
        return self._update() if self._fresh >= self._settings.steps_per_update else None

    def end(self) -> None:
        """Save what was learned since the last checkpoint."""
        if self._learner.counts.updates > self._saved_at:
            self._save({})

    def result(self) -> FollowResult:
        counts = self._learner.counts
        return FollowResult(
            policy_id=self._store.policy_id,
            version=self._learner.policy.version,
            updates=counts.updates,
            rows_read=counts.rows_read,
            rows_trained=counts.rows_trained,
            excluded=dict(counts.excluded),
            conflicts=self._conflicts,
        )

    # one update

    def _update(self) -> Metrics:
        begin = time.perf_counter()
        used, left_out = concat_samples(self._gathered), self._left_out
        self._clear()
        lag = self._lag(used)
        metrics = {**self._learner.learn(used, left_out), **lag}
        self._position = self._reader.state_dict()
        learned = time.perf_counter()
        counts = self._learner.counts
        metrics |= {"update": counts.updates, "rows_trained": counts.rows_trained}
        if self._settings.publish:
            self._publish(metrics)
        published = time.perf_counter()
        if counts.updates % self._settings.checkpoint_every == 0:
            self._save(metrics)
        metrics |= {
            "version": self._learner.policy.version,
            "publish_seconds": published - learned,
            "seconds": time.perf_counter() - begin,
        }
        return metrics

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

    # what it leaves behind

    def _publish(self, metrics: Metrics) -> None:
        """Make the weights live. If somebody else did so meanwhile, theirs stay until the next."""
        candidate = self._add_candidate(metrics)
        try:
            self._learner.policy.version = self._store.publish(candidate).version
        except GenerationConflict:
            self._conflicts += 1
            live = self._store.live()
            self._learner.policy.version = live.version if live else -1

    def _add_candidate(self, metrics: Metrics) -> str:
        learner = self._learner
        policy = learner.policy
        return self._store.add_candidate(
            policy.get_weights(),
            spec=policy.spec.to_json(),
            metrics={
                "algorithm": type(learner.config).__name__,
                "config": finite(asdict(learner.config)),
                **finite(metrics),
            },
            lineage=learner.lineage,
            filter_state=policy.filter.to_json(),
            checkpoint=self._checkpoint.name,
        )

    def _save(self, metrics: Metrics) -> None:
        """A checkpoint as of the last update: rows gathered since are read again."""
        if not self._settings.publish:
            self._add_candidate(metrics)
        self._learner.save(self._checkpoint, reader_state=self._position)
        self._saved_at = self._learner.counts.updates
        self._store.prune(self._settings.keep_versions)


def _declared(root: Path | str, policy_id: str) -> PolicySpec:
    found = declared_spec(Path(root), policy_id)
    if found is None:
        raise ValueError(f"{root}: expected policies/{policy_id}.json or a spec, found neither")
    return found


def _reader(
    root: Path | str, policy_id: str, config: AlgorithmConfig, batch_size: int
) -> ShardReader:
    return ShardReader(
        root,
        policy_id=policy_id,
        mode="fragments",
        batch_size=batch_size,
        follow=True,
        columns=tuple(dict.fromkeys((*config.columns, "source", POLICY_VERSION))),
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
