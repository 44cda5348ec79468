"""The evaluation job: what would these weights have earned on the episodes that were logged?

    result = evaluate("run", "default", digest, estimators=("snips", "dr"), confidence=0.95)
    for estimate in result.target:
        print(estimate.name, estimate.value, estimate.interval, estimate.ess)
    result.behaviour.value                        # what the logging policy earned

policy.jobs.report has what comes out: `EvaluationResult`, the gate for publishing, a plot.

By default it judges by the episodes that training held out, and by whole ones alone: what is left
out is counted by reason. The logging policy's own value is taken over the same episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.preprocessors import columns_of
from policy.inference.spec import PolicySpec
from policy.jobs.report import HELD_OUT, EvaluationError, EvaluationResult, Split
from policy.ope.cross_fitting import CrossFitted, cross_fit
from policy.ope.estimators import ESTIMATORS, Bootstrap, Episodes, Estimate, Interval, StudentT
from policy.ope.value_models import LinearRewardModel
from policy.progress import Progress, no_progress
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.sample_batch import (
    ACTION_LOGP,
    AGENT_ID,
    EPISODE_ORDINAL,
    EPS_ID,
    REWARDS,
    STREAM,
    SampleBatch,
    T,
    concat_samples,
)
from storage.reading.ledger import Ranges
from storage.reading.retries import RETRY_FOR
from storage.reading.shard_reader import ShardReader, held_out
from storage.spaces.descriptors import Discrete
from storage.weights.store import Candidate, Manifest, WeightStore

__all__ = ["EvaluationError", "EvaluationResult", "evaluate"]

_COLUMNS = (EPS_ID, "obs", "actions", REWARDS, ACTION_LOGP, AGENT_ID, "ended")
_ONE_STEP = ("ips", "snips", "dm", "dr")
_ONE_STEP_ANY_ACTION = ("ips", "snips")
_ANY_LENGTH = ("is", "pdis", "wis", "cwpdis")
_NEEDS_MODEL = frozenset({"dm", "dr", "sndr", "switch_dr", "dr_os"})


def evaluate(
    root: Path | str,
    policy_id: str = DEFAULT_POLICY,
    weights: str | int | None = None,
    *,
    split: Split = "held_out",
    held_out: float | None = None,
    estimators: Sequence[str] | None = None,
    gamma: float = 1.0,
    confidence: float = 0.95,
    interval: Literal["student", "bootstrap"] = "student",
    folds: int = 5,
    seed: int = 0,
    manifest: Mapping[str, Ranges] | None = None,
    store: WeightStore | None = None,
    label: str | None = None,
    retry_for: float = RETRY_FOR,
    on_progress: Progress = no_progress,
) -> EvaluationResult:
    """Estimate the value of a candidate (digest) or version (number) on the shards under `root`.

    Without `weights`: the live version. `manifest` (stream -> ordinal ranges): nothing else is
    read. `store` is where the weights lie, if not under `root`, as
    when the log is another one. `held_out` defaults to the share that the weights say their
    training held out. `estimators` default to those that fit the episodes; one that cannot be
    computed is named in `unavailable`. Models (dm, dr) are cross-fitted on the episodes themselves,
    in episodes of several steps by fitted Q evaluation.

    Raises EvaluationError when no estimator says anything, ValueError for unknown names.
    """
    judge = _Judge(gamma, confidence, interval, seed, folds)
    _check_names(split, estimators)
    policy, fraction, weights = _load(store or WeightStore(root, policy_id), weights, held_out)
    share = fraction if split == "held_out" else None
    log = _read(root, policy_id, share, policy.spec, manifest, retry_for, on_progress)
    if not log.lengths.size:
        raise EvaluationError(f"policy {policy_id!r}: no episodes to judge by: {log.left_out()}")
    target, unavailable = judge.all(policy, log, estimators)
    if not target:
        raise EvaluationError(f"policy {policy_id!r}: no estimate: {unavailable}")
    behaviour = judge.one("v_behavior", log.episodes(policy))
    return EvaluationResult(
        policy_id=policy_id,
        weights=weights,
        label=label or f"{policy_id} {str(weights)[:12]}",
        split=split,
        held_out=fraction,
        gamma=gamma,
        confidence=confidence,
        target=tuple(target),
        behaviour=behaviour,
        episodes=behaviour.n,
        excluded=log.excluded,
        not_read=log.not_read,
        unavailable=unavailable,
        skipped=log.skipped,
    )


# --- the weights and the log -----------------------------------------------------------------


def _load(
    store: WeightStore, weights: str | int | None, held_out: float | None
) -> tuple[NumpyPolicy, float, str | int]:
    """(the policy, the share its training held out, its digest or version)."""
    found: Candidate | Manifest
    if weights is None:
        live = store.live()
        if live is None:
            raise EvaluationError(f"policy {store.policy_id!r}: nothing is live; name the weights")
        weights = live.version
    if isinstance(weights, int):
        found, arrays = store.load(weights)
    else:
        found, arrays = store.load_candidate(weights)
        weights = found.digest
    if held_out is None:
        held_out = float(found.metrics.get("held_out", HELD_OUT))
    spec = PolicySpec.from_json(found.spec)
    return NumpyPolicy(spec, arrays, filter_state=found.filter_state), held_out, weights


@dataclass(frozen=True)
class _Log:
    """Whole episodes with propensities: their steps one behind the other, S in all."""

    steps: SampleBatch
    flat: npt.NDArray[np.float32]  # (S, D) observations
    lengths: npt.NDArray[np.int64]  # (n,)
    excluded: dict[str, int]  # why -> episodes
    not_read: dict[str, int]  # why -> steps
    skipped: dict[str, str]  # damaged shard -> why

    @property
    def one_step(self) -> bool:
        return bool((self.lengths == 1).all())

    def episodes(self, policy: NumpyPolicy, fitted: CrossFitted | None = None) -> Episodes:
        """The same with the target policy's logp, and q and v of a fitted model."""
        actions = columns_of(policy.spec.action, "actions", self.steps)
        return Episodes.from_flat(
            self.steps[REWARDS],
            lengths=self.lengths,
            behaviour_logp=self.steps[ACTION_LOGP],
            target_logp=policy.logp(self.flat, actions),
            q=None if fitted is None else fitted.q,
            v=None if fitted is None else fitted.v,
            excluded=self.excluded,
            densities=not policy.spec.layout.is_discrete,
        )

    def left_out(self) -> str:
        counts = [f"{why}: {n} episodes" for why, n in self.excluded.items() if n]
        counts += [f"{why}: {n} steps" for why, n in self.not_read.items() if n]
        return ", ".join([*counts, *self.skipped.values()]) or "none were found"


def _read(
    root: Path | str,
    policy_id: str,
    share: float | None,
    spec: PolicySpec,
    manifest: Mapping[str, Ranges] | None,
    retry_for: float,
    on_progress: Progress,
) -> _Log:
    """The log in memory; with a `share`, only the episodes that it holds out."""

    def of_split(batch: SampleBatch) -> npt.NDArray[np.bool_]:
        return np.ones(batch.count, np.bool_) if share is None else held_out(batch, share)

    batches: list[SampleBatch] = []
    rows = 0
    with ShardReader(
        root,
        policy_id=policy_id,
        select=of_split,
        ordinals=manifest,
        columns=_COLUMNS,
        retry_for=retry_for,
    ) as reader:
        for batch in reader:
            batches.append(batch)
            rows += batch.count
            on_progress("reading", rows, None)
        not_read = {
            ("other_split" if why == "select" else why): n
            for why, n in reader.stats.excluded.items()
        }
        skipped = dict(reader.stats.excluded_shards)
    if not batches:
        flat = np.empty((0, spec.flattener.size), np.float32)
        return _Log(SampleBatch(), flat, np.empty(0, np.int64), {}, not_read, skipped)
    steps, lengths = _by_episode(concat_samples(batches))
    steps, lengths, excluded = _whole(steps, lengths)
    flat = spec.flattener.columns(columns_of(spec.observation, "obs", steps))
    return _Log(steps, flat, lengths, excluded, not_read, skipped)


def _by_episode(steps: SampleBatch) -> tuple[SampleBatch, npt.NDArray[np.int64]]:
    """(steps sorted by episode and t, length of each episode)."""
    keys = [
        np.unique(steps[STREAM].astype(str), return_inverse=True)[1],
        steps[EPISODE_ORDINAL],
        np.unique(steps[AGENT_ID].astype(str), return_inverse=True)[1],
    ]
    order = np.lexsort((steps[T], *reversed(keys)))
    first = np.zeros(steps.count, np.bool_)
    first[0] = True
    for key in keys:
        first[1:] |= np.diff(key[order]) != 0
    starts = np.flatnonzero(first)
    return steps.take(order), np.diff(np.append(starts, steps.count))


def _whole(
    steps: SampleBatch, lengths: npt.NDArray[np.int64]
) -> tuple[SampleBatch, npt.NDArray[np.int64], dict[str, int]]:
    """The episodes that estimators can use, and why the others cannot be: one reason each."""
    last = np.cumsum(lengths) - 1
    first = last - lengths + 1
    ended, t = steps["ended"][last], steps[T]
    unknown = np.logical_or.reduceat(np.isnan(steps[ACTION_LOGP]), first)
    reasons = {
        "incomplete": (t[first] != 0) | (t[last] != lengths - 1),
        "unfinished": np.array([word is None for word in ended], np.bool_),
        "abandoned": np.asarray(ended == "abandoned", np.bool_),
        "broken": np.asarray(ended == "broken", np.bool_),
        "no_propensity": unknown,
    }
    keep, excluded = np.ones(len(lengths), np.bool_), {}
    for reason, episodes in reasons.items():
        number = int((episodes & keep).sum())
        if number:
            excluded[reason] = number
        keep &= ~episodes
    return steps.take(np.repeat(keep, lengths)), lengths[keep], excluded


# --- the estimates ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Judge:
    gamma: float
    confidence: float
    interval: str
    seed: int
    folds: int

    def __post_init__(self) -> None:
        if self.interval not in ("student", "bootstrap"):
            raise ValueError(f"interval: expected student or bootstrap, got {self.interval!r}")
        self._interval()  # refuses a confidence outside (0, 1)

    def all(
        self, policy: NumpyPolicy, log: _Log, names: Sequence[str] | None
    ) -> tuple[list[Estimate], dict[str, str]]:
        """(estimates, estimator -> why there is none)."""
        names = _fitting(policy.spec, log) if names is None else names
        fitted, why_not = None, ""
        if _NEEDS_MODEL & set(names):
            fitted, why_not = self._fit(policy, log)
        episodes = log.episodes(policy, fitted)
        estimates, unavailable = [], {}
        for name in names:
            if why_not and name in _NEEDS_MODEL:
                unavailable[name] = why_not
                continue
            try:
                estimates.append(self.one(name, episodes))
            except ValueError as error:
                unavailable[name] = str(error)
        return estimates, unavailable

    def one(self, name: str, episodes: Episodes) -> Estimate:
        return ESTIMATORS[name](episodes, gamma=self.gamma, interval=self._interval())

    def _interval(self) -> Interval:
        if self.interval == "student":
            return StudentT(self.confidence)
        return Bootstrap(np.random.default_rng(self.seed), self.confidence)

    def _fit(self, policy: NumpyPolicy, log: _Log) -> tuple[CrossFitted | None, str]:
        """q and v cross-fitted over the episodes, or why there are none."""
        space = policy.spec.action
        if not isinstance(space, Discrete):
            return None, "reward models need a Discrete action space"
        folds = min(self.folds, len(log.lengths))
        if folds < 2:
            return None, "cross-fitting needs 2 or more episodes"
        return cross_fit(
            lambda: LinearRewardModel(space.n, start=space.start),
            log.flat,
            log.steps["actions"],
            log.steps[REWARDS],
            policy.probabilities(log.flat),
            lengths=log.lengths,
            terminated=log.steps["ended"][np.cumsum(log.lengths) - 1] == "terminated",
            gamma=self.gamma,
            rng=np.random.default_rng(self.seed),
            folds=folds,
        ), ""


def _fitting(spec: PolicySpec, log: _Log) -> tuple[str, ...]:
    if not log.one_step:
        return _ANY_LENGTH
    return _ONE_STEP if isinstance(spec.action, Discrete) else _ONE_STEP_ANY_ACTION


def _check_names(split: str, estimators: Sequence[str] | None) -> None:
    if split not in ("held_out", "all"):
        raise ValueError(f"split: expected held_out or all, got {split!r}")
    unknown = [name for name in estimators or () if name not in ESTIMATORS]
    if unknown or (estimators is not None and not estimators):
        raise ValueError(f"estimators: expected names of {sorted(ESTIMATORS)}, got {unknown}")
