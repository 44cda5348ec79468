"""The training job: shards -> learner -> candidate.

    result = train("run", "default", BanditConfig(objective="dr"), TrainSettings(seed=7))
    result.candidate           # digest of weights/default/candidates/{digest}
    result.rows_trained, result.excluded

A fixed share of the episodes is reserved for policy.judging.evaluate
(storage.reading.shard_reader.Reserve), the same ones in every run. The same shards, settings and
seed give the same candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.base import AlgorithmConfig, default_rule
from policy.algorithms.learner import Learner
from policy.algorithms.settings import changed
from policy.data.freeze import Frozen
from policy.data.log_selection import LogSelection
from policy.data.run_once import Document, once, require_all
from policy.data.schemas import HELD_OUT, never_stored, require_fit
from policy.inference.action_rule import SAMPLE, ActionRule
from policy.inference.filters import MeanStdFilter
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from policy.progress import OnPart, Progress, no_progress
from policy.tracking import TrackedRun, named
from policy.training.cross_fit import FirstBlocks, blocks_in_order, require_blocks, up_to
from policy.training.settings import TrainSettings
from storage.declarations.declaration import DeclarationError
from storage.declarations.policy_files import load_declarations
from storage.errors import NothingYet, WeightStoreError
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import (
    EPISODE_ORDINAL,
    ORDINAL,
    STREAM,
    SampleBatch,
    T,
    concat_samples,
)
from storage.objects.opening import Root, objects_at
from storage.reading.holdout import Reserve, tag_names
from storage.reading.ledger import Ranges
from storage.reading.shard_reader import Select, ShardReader
from storage.spaces.candidates import Candidates
from storage.spaces.descriptors import Space, SpaceError
from storage.weights.folds import Fold, Folds, fold_files
from storage.weights.manifest import finite
from storage.wording import counted

READ_ROWS = 4096
FILTER_CLIP = 10.0
"""Standardised observations are clipped to this many standard deviations: a feature that is rarely
other than 0 would otherwise drown the rest when it is."""
BLOCK_ROWS = 500_000
"""Rows are trained on in blocks of about this size, which bounds memory. A log that fits in one
block is trained on as a whole."""


class NothingToTrainOn(ValueError):
    """No row can be trained on; the text says how many were left out, and why."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a training run. Rows are steps: read = trained + excluded.

    `rows_held_out` and `not_read` are further rows of the same shards.
    """

    candidate: str
    policy_id: str
    algorithm: str
    seed: int
    evaluation_share: float  # the reserved share of the episodes or clusters
    cluster: str
    action_rule: Mapping[str, Any]  # of the candidate
    rows_read: int
    rows_trained: int
    rows_held_out: int
    cross_fit: int | None = None  # the number of blocks
    excluded: Mapping[str, int] = field(default_factory=dict)  # reason -> rows
    not_read: Mapping[str, int] = field(default_factory=dict)  # reason -> rows, as other_policy
    lineage: Mapping[str, list[list[int]]] = field(default_factory=dict)  # stream -> ordinals
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last update
    skipped: Mapping[str, str] = field(default_factory=dict)  # damaged shard -> reason
    unchanged: bool = False  # the candidate existed already: the same rows and settings

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain types for strict JSON."""
        return {**asdict(self), "metrics": finite(self.metrics)}


def train(
    root: Root,
    policy_id: str = DEFAULT_POLICY,
    algorithm: AlgorithmConfig | None = None,
    settings: TrainSettings | None = None,
    *,
    spec: PolicySpec | None = None,
    manifest: Mapping[str, Ranges] | None = None,
    run: TrackedRun | None = None,
    on_progress: Progress = no_progress,
) -> TrainResult:
    """Train a policy on the shards under `root`, and store the weights as a candidate.

    - `algorithm` defaults to `BanditConfig()`.
    - `spec` defaults to the declared one, or to a default network between the declared (or stored)
      spaces, which standardises observations.
    - `manifest`: read only these ordinals (stream -> inclusive ranges).
    - `run`: gets the settings, the metrics of each tenth of the updates, and the candidate, whose
      manifest has the run's `uri`.

    Raises NothingYet if later episodes may be trained on, and NothingToTrainOn if the stored rows
    or the selection do not fit; ValueError for settings, spaces or shards that do not fit, and
    ReaderError, which names the shards, if they cannot be read.
    """
    settings = settings or TrainSettings()
    torch.set_num_threads(settings.threads)
    config = _configured(algorithm, settings)
    wanted = spec or declared_spec(root, policy_id)
    reserve = _reserve(settings)
    selection = LogSelection(
        root=root,
        policy_id=policy_id,
        since=settings.since,
        until=settings.until,
        manifest=manifest,
        schema_id=settings.schema_id,
        retry_for=settings.retry_for,
    )
    make = partial(_learner, config=config, settings=settings)
    not_reserved = _NotReserved(reserve)
    columns = (*reserve.columns, *config.columns)
    with selection.reader(batch_size=READ_ROWS, select=not_reserved, columns=columns) as reader:
        learner, metrics = _learn(reader, wanted, partial(make, run=run), on_progress)
        selection.count_other_schemas(reader)
        if learner is None or not learner.counts.rows_trained:
            raise _nothing(selection, reserve, learner, reader)
        reserve.require_tag(not_reserved.tags)
        folds = None
        if settings.cross_fit is not None:
            again = partial(_learn_part, wanted=learner.policy.spec, make=make, columns=columns)
            folds = _fold_policies(
                again, selection, reserve, learner, settings.cross_fit, on_progress
            )
        if settings.checkpoint is not None:
            learner.save(settings.checkpoint, reader_state=reader.state_dict())
        result = _result(learner, reader, metrics, policy_id, settings, reserve)
        return _keep(learner, result, root, settings.checkpoint, folds, run)


def _reserve(settings: TrainSettings) -> Reserve:
    share, cluster = settings.evaluation_share, settings.cluster or ""
    if settings.cross_fit is None:
        return Reserve(HELD_OUT if share is None else share, cluster)
    require_blocks(settings.cross_fit, held_out=bool(share))
    return Reserve(0.0, cluster)


def _learn(
    reader: ShardReader,
    wanted: PolicySpec | None,
    make: Callable[[PolicySpec], Learner],
    on_progress: Progress,
) -> tuple[Learner | None, Mapping[str, float]]:
    """(the learner after all rows of a reader, the metrics of its last update)."""
    learner = None if wanted is None else make(wanted)
    metrics: dict[str, float] = {}
    for block in _blocks(reader, on_progress):
        if wanted is not None and reader.spaces is not None:
            require_fit(reader.spaces, (wanted.observation, wanted.action))
        learner = learner or make(_stored_spec(reader))
        metrics = learner.update(block, on_progress) or metrics
    return learner, metrics


def _learn_part(
    selection: LogSelection,
    on_progress: Progress,
    *,
    wanted: PolicySpec,
    make: Callable[[PolicySpec], Learner],
    columns: Sequence[str],
    select: Select | None = None,
) -> Learner:
    """A fold policy's learner. Raises NothingToTrainOn if its part has no row for it."""
    with selection.reader(batch_size=READ_ROWS, select=select, columns=columns) as reader:
        learner, _ = _learn(reader, wanted, make, on_progress)
    if learner is None or not learner.counts.rows_trained:
        raise NothingToTrainOn("cross_fit: expected rows in each block, got none in one")
    return learner


def _fold_policies(
    again: Callable[..., Learner],
    selection: LogSelection,
    reserve: Reserve,
    learner: Learner,
    number: int,
    on_progress: Progress,
) -> Folds:
    """The fold policies of the training that made `learner`; see policy.training.cross_fit."""
    trained = {stream: RangeSet.from_json(one) for stream, one in learner.lineage.items()}
    if reserve.cluster:
        parts = [
            again(selection, on_progress, select=FirstBlocks(reserve, block, number))
            for block in range(1, number)
        ]
        seen = [{s: RangeSet.from_json(one) for s, one in part.lineage.items()} for part in parts]
        return _folds(parts, seen, trained, in_order=False)
    *blocks, every = blocks_in_order(trained, number)
    parts = [
        again(replace(selection, manifest=up_to(block, selection.manifest)), on_progress)
        for block in blocks
    ]
    return _folds(parts, blocks, every, in_order=True)


def _folds(
    learners: Sequence[Learner],
    seen: Sequence[Mapping[str, RangeSet]],
    by_all: Mapping[str, RangeSet],
    *,
    in_order: bool,
) -> Folds:
    policies = [learner.policy for learner in learners]
    folds = [
        Fold(policy.get_weights(), policy.filter.to_json(), own)
        for policy, own in zip(policies, seen, strict=True)
    ]
    return Folds(folds, by_all, in_order)


def _configured(algorithm: AlgorithmConfig | None, settings: TrainSettings) -> AlgorithmConfig:
    config = algorithm or BanditConfig()
    epochs = settings.epochs
    return config if epochs is None else changed(config, {"epochs": epochs})


def declared_spec(root: Root, policy_id: str) -> PolicySpec | None:
    """The spec in `policies/{id}.json`, or a default network between its spaces; None without.

    The default standardises observations. Raises DeclarationError, which names the file.
    """
    declaration = load_declarations(root).get(policy_id)
    if declaration is None:
        return None
    if declaration.spec is not None:
        try:
            return PolicySpec.from_json(dict(declaration.spec))
        except ValueError as error:
            where = f"{objects_at(root)}/policies/{policy_id}.json"
            raise DeclarationError(f"{where}: spec: {error}") from error
    return _default_spec(declaration.observation, declaration.action)


def _default_spec(observation: Space, action: Space) -> PolicySpec:
    module = ModuleSpec()
    try:
        if Candidates.of(observation, action) is not None:
            module = ModuleSpec(kind="scorer")
        return PolicySpec(observation, action, module, observation_filter="MeanStdFilter")
    except SpaceError:  # leaves of release 0.1.0, which gave these names no meaning
        kind = "MeanStdFilter"
        return PolicySpec(observation, action, observation_filter=kind, mask=False)


def _stored_spec(reader: ShardReader) -> PolicySpec:
    if reader.spaces is None:
        raise NothingToTrainOn("expected rows in shards that name their spaces, got none")
    return _default_spec(*reader.spaces)


def acting_spec(
    spec: PolicySpec,
    config: AlgorithmConfig,
    action_rule: ActionRule | None = None,
    explore: float | None = None,
) -> PolicySpec:
    """The spec with `action_rule`, and in it `explore`; without a rule, with its own.

    If its own is the default (sampling), the algorithm's default replaces it, because values of
    actions cannot be sampled from.
    """
    takes_default = spec.action_rule == SAMPLE and spec.layout.is_discrete  # others: see the config
    own = default_rule(config) if takes_default else spec.action_rule
    rule = own if action_rule is None else action_rule
    return replace(spec, action_rule=rule if explore is None else replace(rule, explore=explore))


def new_policy(spec: PolicySpec, seed: int) -> Policy:
    """A policy to train, whose filter cuts off what it has hardly seen."""
    state = None
    if spec.observation_filter == "MeanStdFilter":
        state = MeanStdFilter(spec.flattener.features, clip=FILTER_CLIP).to_json()
    return Policy(spec, seed=seed, filter_state=state)


def _learner(
    spec: PolicySpec,
    config: AlgorithmConfig,
    settings: TrainSettings,
    run: TrackedRun | None = None,
) -> Learner:
    acting = acting_spec(spec, config, settings.action_rule, settings.explore)
    learner = Learner(new_policy(acting, settings.seed), config, seed=settings.seed)
    learner.warns = False  # the result, or the error without one, counts what is left out
    algorithm: Any = learner.algorithm
    if run is not None and hasattr(algorithm, "on_part"):
        algorithm.on_part = _measuring(run)
    return learner


def _measuring(run: TrackedRun) -> OnPart:
    """Record the metrics of each part of a training, by the updates of all its blocks."""
    before = latest = 0

    def on_part(done: int, metrics: Mapping[str, float]) -> None:
        nonlocal before, latest
        before += latest if done <= latest else 0  # a new block counts from 1
        latest = done
        run.measure(named(metrics), before + done)

    return on_part


class _NotReserved:
    """Chooses the rows to train on, and notes which tags the episodes have."""

    def __init__(self, reserve: Reserve) -> None:
        self._reserve = reserve
        self.tags: set[str] = set()

    def __call__(self, batch: SampleBatch) -> npt.NDArray[np.bool_]:
        if self._reserve.cluster:
            self.tags |= tag_names(batch)
        return ~self._reserve.rows(batch)


def _blocks(reader: ShardReader, on_progress: Progress) -> Iterator[SampleBatch]:
    """Yield batches of about BLOCK_ROWS rows, each sorted by streams and ordinals."""
    held: list[SampleBatch] = []
    rows = read = 0
    for batch in reader:
        held.append(batch)
        rows, read = rows + batch.count, read + batch.count
        on_progress("reading", read, None)
        if rows >= BLOCK_ROWS:
            yield _ordered(held)
            held, rows = [], 0
    if rows:
        yield _ordered(held)


def _ordered(batches: list[SampleBatch]) -> SampleBatch:
    """One batch in an order that does not depend on the division into shards."""
    batch = concat_samples(batches)
    streams = np.unique(batch[STREAM].astype(str), return_inverse=True)[1]
    return batch.take(np.lexsort((batch[T], batch[ORDINAL], batch[EPISODE_ORDINAL], streams)))


def _result(
    learner: Learner,
    reader: ShardReader,
    metrics: Mapping[str, float],
    policy_id: str,
    settings: TrainSettings,
    reserve: Reserve,
) -> TrainResult:
    not_read = dict(reader.stats.excluded)
    return TrainResult(
        candidate="",
        policy_id=policy_id,
        algorithm=type(learner.config).__name__,
        seed=settings.seed,
        evaluation_share=reserve.share,
        cluster=reserve.cluster,
        action_rule=learner.policy.spec.action_rule.to_json(),
        rows_read=learner.counts.rows_read,
        rows_trained=learner.counts.rows_trained,
        rows_held_out=not_read.pop("select", 0),
        cross_fit=settings.cross_fit,
        excluded=dict(learner.counts.excluded),
        not_read=not_read,
        lineage=learner.lineage,
        metrics=metrics,
        skipped=dict(reader.stats.excluded_shards),
    )


def _keep(
    learner: Learner,
    result: TrainResult,
    root: Root,
    checkpoint: Path | str | None,
    folds: Folds | None,
    run: TrackedRun | None,
) -> TrainResult:
    """Store the candidate. Its metrics have the reserved share, which evaluation needs."""
    policy, store = learner.policy, WeightStore(root, result.policy_id)
    before = store.candidates()
    digest = store.add_candidate(
        policy.get_weights(),
        spec=policy.spec.to_json(),
        metrics={
            "algorithm": result.algorithm,
            "config": finite(asdict(learner.config)),
            "seed": result.seed,
            "evaluation_share": result.evaluation_share,
            "cluster": result.cluster,
            **({} if result.cross_fit is None else {"cross_fit": result.cross_fit}),
            "rows_trained": result.rows_trained,
            **({} if run is None else {"run": run.uri}),
            **finite(result.metrics),
        },
        lineage=learner.lineage,
        filter_state=policy.filter.to_json(),
        checkpoint=None if checkpoint is None else Path(checkpoint).name,
        folds=None if folds is None else fold_files(folds),
    )
    if run is not None:
        names = ("policy_id", "algorithm", "seed", "rows_trained")
        run.note({"candidate": digest, **{name: getattr(result, name) for name in names}})
        run.note({"metrics": finite(result.metrics)})
    return replace(result, candidate=digest, unchanged=digest in before)


def _nothing(
    selection: LogSelection, reserve: Reserve, learner: Learner | None, reader: ShardReader
) -> NothingYet | NothingToTrainOn:
    """NothingYet if episodes that are stored later may be trained on with the same settings.

    Not if stored rows could not be used, if no episode has or will have a requested schema, or if
    the data set is frozen or held out as a whole.
    """
    never = never_stored(selection.root, selection.policy_id, selection.schema_id)
    refused = learner is not None and any(learner.counts.excluded.values())
    misnamed = selection.schema_id is not None and "other_schema" in reader.stats.excluded
    damaged = bool(reader.stats.excluded_shards)
    closed = selection.manifest is not None or reserve.share >= 1
    message = _why_nothing(selection.policy_id, learner, reader) + never
    if closed or never or refused or misnamed or damaged:
        return NothingToTrainOn(message)
    return NothingYet(message)


def _why_nothing(policy_id: str, learner: Learner | None, reader: ShardReader) -> str:
    counts = {**reader.stats.excluded, **(learner.counts.excluded if learner else {})}
    counts["held_out"] = counts.pop("select", 0)
    if not (reader.stats.shards or reader.stats.excluded_shards or any(counts.values())):
        return (
            f"policy {policy_id!r}: expected rows to learn from, found no shard yet. An episode is "
            "in a shard seconds after its end or its reward window; `headrace ls` counts them"
        )
    reasons = (f"{why.replace('_', ' ')}: {rows}" for why, rows in counts.items() if rows)
    left_out = ", ".join(reasons) or "none"
    bad = (
        f"; {counted(len(reader.stats.excluded_shards), 'damaged shard')}"
        if reader.stats.excluded_shards
        else ""
    )
    longer = (
        "; dr, ips, snips and dm learn episodes of one step: use --algorithm cql, iql, marwil or "
        "bc for longer ones"
    )
    likely = (
        "; dr, ips and snips need propensities: log or import them (--action-prob, or --uniform if "
        "that is true), or use --algorithm dm"
    )
    hint = longer if counts.get("not_one_step") else likely if counts.get("no_propensity") else ""
    return (
        f"policy {policy_id!r}: expected rows to learn from, found none in "
        f"{counted(reader.stats.shards, 'shard')} (rows left out: {left_out}{bad}){hint}"
    )


def train_once(
    root: Root,
    policy_id: str,
    algorithm: AlgorithmConfig,
    frozen: Frozen,
    settings: TrainSettings | None = None,
    *,
    run: TrackedRun | None = None,
    on_progress: Progress = no_progress,
) -> Document:
    """Train on a frozen data set, unless the same training is recorded and its candidate exists.

    The arguments are those of `train`. Returns `TrainResult.to_dict` with `manifest` (the hash) and
    `unchanged`. Raises DataIncomplete if a shard was skipped (the training is then not recorded),
    and the errors of `train`.
    """
    settings = settings or TrainSettings()
    config, rule = _configured(algorithm, settings), settings.action_rule
    declaration = load_declarations(root).get(policy_id)
    key = {
        "policy_id": policy_id,
        "spec": declaration and declaration.spec,
        "algorithm": type(config).__name__,
        "config": asdict(config),
        "evaluation_share": _reserve(settings).share,
        "cluster": settings.cluster or "",
        "since": settings.since,
        "until": settings.until,
        "seed": settings.seed,
    }
    key |= {} if settings.cross_fit is None else {"cross_fit": settings.cross_fit}
    key |= {} if rule is None else {"action_rule": rule.to_json()}
    key |= {} if settings.explore is None else {"explore": settings.explore}
    store = WeightStore(root, policy_id)

    def work() -> Document:
        again = partial(train, manifest=frozen.streams, run=run, on_progress=on_progress)
        result = again(root, policy_id, config, settings)
        if run is not None:
            run.note({"manifest": frozen.hash})
        require_all(frozen, result.skipped)
        return result.to_dict()

    return once(frozen, "train", key, work, lambda known: _is_there(store, known["candidate"]))


def _is_there(store: WeightStore, candidate: str) -> bool:
    try:
        store.load_candidate(candidate)
    except WeightStoreError:
        return False
    return True
