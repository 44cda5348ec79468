"""The evaluation job: estimate the return of weights, and compare them with the live version.

    result = evaluate("run", "default", digest, EvaluationSettings(reward_range=(0.0, 1.0)))
    result.judgement.verdict, result.judgement.reasons   # "cannot tell", ("... 24,000 more ...",)
    for estimate in result.target:
        print(estimate.name, estimate.value, estimate.interval, estimate.ess)
    result.behaviour.value                        # the mean return of the logging policy

`EvaluationResult` and its plot are in policy.judging.report.

By default it judges by complete episodes that were held out of training; others are counted by
reason. The bars are the live version and the logging policy, over the same episodes, none of which
the candidate or the live version was trained on. A policy's probabilities are those of its action
rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.data.log_selection import LogSelection
from policy.data.schemas import HELD_OUT, require_fit
from policy.inference.distributions import NotFinite
from policy.inference.finite import NOT_FINITE
from policy.inference.preprocessors import columns_of
from policy.inference.spec import PolicySpec
from policy.judging.action_cells import cells_of
from policy.judging.fold_policies import FoldPolicies
from policy.judging.judged_log import JUDGED_BY, JudgedBlock, JudgedLog, Lineage, rows_of_block
from policy.judging.judged_sample import Sample, Taken, ahead
from policy.judging.report import EvaluationResult
from policy.judging.scratch import Scratch
from policy.judging.settings import EvaluationSettings, Split
from policy.ope.alpha_budget import candidates_note, confidence_of
from policy.ope.cross_fitting import CrossFitted, cross_fit
from policy.ope.diagnostics import LEAST_ESS, Diagnostic, at_most
from policy.ope.episodes import Episodes
from policy.ope.estimators import ESTIMATORS, Estimate
from policy.ope.intervals import Bootstrap, Interval, StudentT
from policy.ope.judgement import Evidence, Judged, Judgement, Rules, TargetPolicy
from policy.ope.margins import Margin
from policy.ope.reward_cap import AUTO, FIRST_SHARE, Cap, cap_note, parse_cap, proposed_cap
from policy.ope.value_models import CandidateRewardModel, LinearRewardModel, RewardModel
from policy.progress import Progress, no_progress
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations
from storage.errors import NothingYet, WeightsNotFound
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import (
    ACTION_LOGP,
    ORDINAL,
    REWARDS,
    STREAM,
    SampleBatch,
    concat_samples,
)
from storage.objects.opening import Root
from storage.reading.holdout import Reserve
from storage.reading.ledger import Ranges
from storage.spaces.descriptors import Discrete
from storage.system.memory import return_memory
from storage.weights.decisions import Document, Earlier, earlier_of
from storage.weights.manifest import Candidate, Manifest
from storage.weights.store import WeightFolder
from storage.wording import counted

_ONE_STEP = ("ips", "snips", "dm", "dr")
_ONE_STEP_ANY_ACTION = ("ips", "snips")
_ANY_LENGTH = ("is", "pdis", "wis", "cwpdis")
_NEEDS_MODEL = frozenset({"dm", "dr", "sndr", "switch_dr", "dr_os"})

_NO_DENSITY = "greedy actions have no density in a continuous space"

RETURN_ROWS = 1 << 18
"""Rows between two requests to return freed memory to the operating system; each takes some ms."""
MOST_LOST = 0.05
MOST_LATE = 0.01
MOST_WITHOUT_PROPENSITY = 0.5
MOST_WITHOUT_TAG = 0.5
OTHER_UNIT = "other_unit"
"""The name of a check that `publish` notes."""


def evaluate(
    root: Root,
    policy_id: str = DEFAULT_POLICY,
    weights: str | int | None = None,
    settings: EvaluationSettings | None = None,
    *,
    earlier: Sequence[Document] = (),
    manifest: Mapping[str, Ranges] | None = None,
    store: WeightFolder | None = None,
    label: str | None = None,
    on_progress: Progress = no_progress,
) -> EvaluationResult:
    """Judge weights by the shards under `root`.

    - `weights`: a candidate (digest) or version (number); None: the live version, compared with the
      logging policy only. `store`: the folder of the weights, by default under `root`.
    - `manifest`: only these ordinals (stream -> ranges).
    - `earlier`: decisions, to count earlier looks.

    Without usable episodes, the verdict says what is missing. Raises NothingYet if no weights are
    named and none are live, ValueError for invalid arguments and for spaces that do not fit.
    """
    settings = settings or EvaluationSettings()
    informing = _Estimating(settings)
    declaration = load_declarations(root).get(policy_id)
    loaded, live = _load_both(store or WeightFolder(root, policy_id), weights)
    reserve = _reserved(loaded, settings)
    new = live if settings.since == "live" else None
    selection = LogSelection(
        root=root,
        policy_id=policy_id,
        since=None if settings.since == "live" else settings.since,
        until=settings.until,
        schema_id=settings.schema_id,
        manifest=manifest,
        retry_for=settings.retry_for,
    )
    make_log = _log_of(loaded, live, new, reserve, settings.split, declaration)
    log = _capped(make_log, parse_cap(settings.reward_cap), selection, on_progress)
    rules = Rules(
        reward_range=_limits(settings.reward_range, declaration, log.cap),
        margin=Margin.parse(settings.margin),
        unit=_unit(reserve, settings.split),
        confidence=settings.confidence,
        gamma=settings.gamma,
        min_ess=settings.min_ess,
    )
    label = label or f"{policy_id} {str(loaded.name)[:12]}"
    asked: dict[str, Any] = {"policy_id": policy_id, "split": settings.split}
    asked |= {"since": selection.since, "until": selection.until}
    asked |= _settings(log, rules, reserve, loaded, new, label)
    with Scratch() as scratch:
        gathered = _Gathered(log, loaded, live, rules, scratch)
        gathered.read(log.blocks(selection, on_progress))
        gathered.read_later(selection)
        before = earlier_of(earlier, loaded.candidate, log.rows, log.episodes, asked)
        shared = candidates_note(before.others + 1, rules.confidence, settings.alpha_budget)
        rules = _with_earlier(rules, before, settings.alpha_budget, streams=len(log.rows))
        found = gathered.judged(rules, [*_other_unit(log, live, earlier), *shared])
    estimates = informing.found(loaded.policy, gathered.sample, log)
    return EvaluationResult(**asked, **_judged(log, live, rules, before, found), **estimates)


def _settings(
    log: JudgedLog,
    rules: Rules,
    reserve: Reserve,
    loaded: _Loaded,
    after: _Loaded | None,
    label: str,
) -> dict[str, Any]:
    """The fields of a result with the settings of its judgement."""
    return {
        "label": label,
        "weights": loaded.name,
        "after_live": after and after.version,
        "cluster": reserve.cluster,
        "evaluation_share": reserve.share,
        "gamma": rules.gamma,
        "reward_range": rules.reward_range,
        "reward_cap": log.cap if log.cap < math.inf else None,
        "margin": str(rules.margin),
    }


def _reserved(loaded: _Loaded, settings: EvaluationSettings) -> Reserve:
    """What was held out: as given, or as recorded with the weights."""
    own, share, cluster = loaded.reserve, settings.evaluation_share, settings.cluster
    return Reserve(
        own.share if share is None else share, own.cluster if cluster is None else cluster
    )


def _log_of(
    loaded: _Loaded,
    live: _Loaded | None,
    after: _Loaded | None,
    reserve: Reserve,
    split: Split,
    declaration: PolicyDeclaration | None,
) -> Callable[..., JudgedLog]:
    """Makes the log to judge by, with further arguments. `after`: only rows newer than its own."""
    held_out = reserve if split == "held_out" else replace(reserve, share=1.0)
    seen = [one.policy.seen for one in (loaded, live) if one is not None]
    until = {
        stream: RangeSet([(0, ranges.to_json()[-1][1])])
        for stream, ranges in (after.lineage if after else {}).items()
        if ranges
    }
    default = 0.0 if declaration is None else declaration.reward_default
    return partial(JudgedLog, loaded.policy.spec, held_out, seen, default, before=until)


def _unit(reserve: Reserve, split: Split) -> str:
    """What is counted as one observation, as a text."""
    unit = f"values of {reserve.cluster}" if reserve.cluster else "episodes"
    return f"held-out {unit}" if split == "held_out" and reserve.share < 1 else unit


def _judged(
    log: JudgedLog, live: _Loaded | None, rules: Rules, before: Earlier, judgement: Judgement
) -> dict[str, Any]:
    """The fields of a result with the judgement, its rules and its data."""
    if live is None and any("canary" in one for one in judgement.reasons):
        first = (
            "a canary needs a live version: `publish --no-gate` makes a first one live, unjudged"
        )
        judgement = replace(judgement, reasons=(*judgement.reasons, first))
    return {
        "confidence": rules.confidence,
        "looks": before.looks,
        "others": before.others,
        "live": None if live is None else live.version,
        "judgement": judgement,
        "episodes": log.episodes,
        "rows": log.rows,
        "excluded": dict(log.excluded),
        "not_read": log.not_read,
        "skipped": log.skipped,
    }


def _capped(
    make_log: Callable[..., JudgedLog], cap: Cap, selection: LogSelection, on_progress: Progress
) -> JudgedLog:
    """The log to judge by, with a cap; `auto` reads it once more, for the first tenth."""
    if cap != AUTO:
        return make_log() if cap is None else make_log(cap=cap)
    log = make_log()
    blocks = [
        (block.steps.select((STREAM, ORDINAL, REWARDS)), block.lengths)
        for block in map(log.prepared, log.blocks(selection, on_progress))
    ]
    counts = np.concatenate([np.empty(0, np.int64), *(lengths for _, lengths in blocks)])
    first = int(counts[: int(FIRST_SHARE * counts.size)].sum())
    steps = concat_samples([one for one, _ in blocks])[:first] if first else None
    found = None if steps is None else proposed_cap(steps[REWARDS])
    if steps is None or found is None:
        return make_log()
    streams, ordinals = steps[STREAM].astype(str), steps[ORDINAL]
    taken = {
        stream: RangeSet([(int(ordinals[mine].min()), int(ordinals[mine].max()))])
        for stream in np.unique(streams).tolist()
        for mine in [streams == stream]
    }
    return make_log(cap=found, cap_from=taken)


def _limits(
    given: tuple[float, float] | None, declaration: PolicyDeclaration | None, cap: float
) -> tuple[float, float] | None:
    """The limits of a step's reward: given or declared; None without, or with infinite ones."""
    if given is None:
        given = None if declaration is None else declaration.reward_range
    if given is None or given[0] == -math.inf:
        return None
    low, high = given[0], min(given[1], cap)
    return None if high == math.inf else (low, high)


def _with_earlier(rules: Rules, before: Earlier, budget: float | None, *, streams: int) -> Rules:
    """The rules after earlier looks. Further episodes are appended to those of one stream only, and
    only under the same settings."""
    confidence = confidence_of(before.others + 1, rules.confidence, budget)
    in_order = streams < 2 and before.alike
    return replace(rules, looks=before.looks, confidence=confidence, in_order=in_order)


# --- the weights -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Loaded:
    """Weights as a policy that acts, and the data that they were trained on."""

    name: str | int  # digest or version
    policy: FoldPolicies
    reserve: Reserve
    lineage: Lineage
    candidate: str  # the digest of the candidate that they came from
    version: int | None


def _load(store: WeightFolder, weights: str | int | None) -> _Loaded:
    """Load a candidate or a version; the live version if `weights` is None."""
    if weights is None:
        live = store.live()
        if live is None:
            raise NothingYet(
                f"policy {store.policy_id!r}: expected a live version, got none; name the weights"
            )
        weights = live.version
    found: Candidate | Manifest
    if isinstance(weights, int):
        store.require_version(weights, "judge")
        manifest, arrays = store.load(weights)
        found, lineage, digest = manifest, store.lineage(weights), manifest.candidate
        try:
            folds = store.folds(digest)
        except WeightsNotFound:  # the candidate was pruned: it is judged by new rows only
            folds = None
    else:
        found, arrays = store.load_candidate(weights)
        weights = digest = found.digest
        lineage, folds = store.candidate_lineage(digest), store.folds(digest)
    spec = PolicySpec.from_json(found.spec)
    policy = FoldPolicies.of(spec, arrays, found.filter_state, lineage, folds)
    version = weights if isinstance(weights, int) else None
    reserve = _reserve(found.metrics, trained=bool(lineage), folded=folds is not None)
    return _Loaded(weights, policy, reserve, lineage, digest, version)


def _reserve(metrics: Mapping[str, Any], *, trained: bool, folded: bool) -> Reserve:
    """The episodes that the training of these weights reserved.

    All, if its fold policies judge its own rows, or if nothing here was trained on.
    """
    share = metrics.get("evaluation_share", HELD_OUT if trained else 1.0)
    return Reserve(1.0 if folded else float(share), str(metrics.get("cluster", "")))


def _load_both(store: WeightFolder, weights: str | int | None) -> tuple[_Loaded, _Loaded | None]:
    """The weights to judge, and the live version as a bar (see `_live_bar`)."""
    loaded = _load(store, weights)
    return loaded, _live_bar(store, loaded)


def _live_bar(store: WeightFolder, judged: _Loaded) -> _Loaded | None:
    """The live version; None if there is none or if it is the one to judge."""
    live = store.live()
    if live is None or live.version == judged.version:
        return None
    found = _load(store, live.version)
    return None if found.candidate == judged.candidate else found


# --- the judgement ---------------------------------------------------------------------------


class _Gathered:
    """Reads a log once, for the judgement's sums and for a sample for the estimates.

    Several threads prepare blocks and compute probabilities; sums are added in the log's order.
    """

    def __init__(
        self,
        log: JudgedLog,
        judged: _Loaded,
        live: _Loaded | None,
        rules: Rules,
        scratch: Scratch,
    ) -> None:
        self._log, self._policy, self._live = log, judged.policy, live
        log.earned.limits = rules.reward_range
        self._comparability, self._bar = _comparable(judged.policy.spec, live)
        names = ["the logging policy"]
        if self._bar is not None and live is not None:
            names.insert(0, f"live version {live.version}")
        bars = [] if self._bar is None else [self._bar]
        self._folded = [
            _InOrder(one, by)
            for one, by in zip((judged.policy, *bars), JUDGED_BY, strict=False)
            if one.several
        ]
        self._evidence = Evidence(names, self._bounded(rules), scratch.column)
        self._certain = self._kept = 0.0  # steps of propensity 1; the candidate's expected matches
        self.sample = Sample()

    def read(self, batches: Iterable[SampleBatch]) -> None:
        """Read all batches. Raises ValueError if no judged episode has the cluster's tag.

        Freed blocks of many sizes fragment the heap, so freed memory is returned from time to time.
        """
        rows = 0
        for block, candidate, bar, kept in ahead(self._asked, batches):
            rows += block.steps.count
            if rows >= RETURN_ROWS:
                rows = 0
                return_memory()
            units = self._log.note(block)
            for folded in self._folded:
                folded.note(block.steps)
            self._certain, self._kept = self._certain + block.certain.count, self._kept + kept
            self.sample.add(block, units)
            if candidate is None or not block.lengths.size:
                continue
            policies = [None] if bar is None else [bar, None]
            self._evidence.add(self._data(block, units), candidate, policies)
        self._log.require_tag()

    def read_later(self, selection: LogSelection) -> None:
        """Read the observations of the steps after the period, if it has an end."""
        if selection.until is None:
            return
        spec, later = self._policy.spec, replace(selection, since=selection.until, until=None)
        rows = rows_of_block(spec.flattener.size)
        with later.reader(batch_size=rows, columns=("obs",)) as reader:
            for batch in reader:
                flat = spec.flattener.columns(columns_of(spec.observation, "obs", batch))
                known = np.isfinite(flat).all(axis=1)
                self._evidence.contexts.add_later(_described(spec, flat[known]))

    def judged(self, rules: Rules, checks: Sequence[Diagnostic]) -> Judgement:
        """The judgement by these rules and the log's checks, with those of the caller."""
        apart = max(0.0, 1 - self._kept / self._certain) if self._certain else 0.0
        log = self._log
        notes = [cap_note(log.cap, log.capped, log.steps)] if log.cap < math.inf else []
        counted = [
            *_counted(self._log, self._live),
            *notes,
            _certain_check(self._log, apart),
            *self._comparability,
        ]
        self._evidence.earned = log.earned
        folded = [one.note_of(bounded=rules.reward_range is not None) for one in self._folded]
        return self._evidence.judged(self._bounded(rules), [*counted, *folded, *checks])

    def _bounded(self, rules: Rules) -> Rules:
        """The rules; without a range if fold policies do not judge in order."""
        if all(one.holds for one in self._folded):
            return rules
        return replace(rules, reward_range=None)

    def _asked(
        self, batch: SampleBatch
    ) -> tuple[JudgedBlock, TargetPolicy | None, TargetPolicy | None, float]:
        """(block, candidate, live version, the candidate's expected matches of certain steps)."""
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                return self._weighed(self._log.prepared(batch))
            except NotFinite:  # an accepted observation overflows in a network
                known = [*self._policy.policies, *(self._bar.policies if self._bar else ())]
                return self._weighed(self._log.prepared(batch, known))

    def _weighed(
        self, block: JudgedBlock
    ) -> tuple[JudgedBlock, TargetPolicy | None, TargetPolicy | None, float]:
        policy, kept = self._policy, 0.0
        if not policy.spec.has_propensity:
            return block, None, None, 0.0
        if block.certain.count:
            actions = columns_of(policy.spec.action, "actions", block.certain)
            flat = policy.spec.flattener.columns(
                columns_of(policy.spec.observation, "obs", block.certain)
            )
            kept = float(np.exp(policy.logp(flat, actions, block.certain[JUDGED_BY[0]])).sum())
        bar = None if self._bar is None else _target(self._bar, block, JUDGED_BY[1])
        return block, _target(policy, block, JUDGED_BY[0]), bar, kept

    def _data(self, block: JudgedBlock, units: npt.NDArray[np.int64] | None) -> Judged:
        space = self._policy.spec.action
        start, names = (space.start, space.names) if isinstance(space, Discrete) else (0, ())
        taken = None
        if isinstance(space, Discrete):
            taken = block.steps["actions"].astype(np.int64) - start
        return Judged(
            rewards=np.asarray(block.steps[REWARDS], np.float64),
            lengths=block.lengths,
            behaviour_logp=np.asarray(block.steps[ACTION_LOGP], np.float64),
            flat=_described(self._policy.spec, block.flat),
            taken=taken,
            start=start,
            names=names or (),
            discrete=self._policy.spec.layout.is_discrete,
            units=units,
            pass_prob=block.pass_prob,
            cells=cells_of(space, columns_of(space, "actions", block.steps)),
            tags=block.tags,
            times=block.times,
            lost=block.lost if block.lost.any() else None,
        )


def _described(spec: PolicySpec, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What models and checks know of observations (S, D): not the features of candidates.

    One model for each position would be large.
    """
    if spec.candidates is not None and spec.flattener.features:
        return spec.flattener.features_of(flat)
    return flat


def _comparable(
    spec: PolicySpec, live: _Loaded | None
) -> tuple[list[Diagnostic], FoldPolicies | None]:
    """(checks that fail if the policies cannot be compared, the live policy if it is a bar)."""
    checks = []
    if not spec.has_propensity:
        checks.append(at_most("no_density", 1, 0, f"the candidate's {_NO_DENSITY}: use a canary"))
    if live is None:
        return checks, None
    who = f"live version {live.version}"
    if live.policy.spec.action != spec.action:
        sentence = f"{who} has another action space: use a canary"
        return [*checks, at_most("live_action_space", 1, 0, sentence)], None
    try:
        require_fit((spec.observation, spec.action), (live.policy.spec.observation, spec.action))
    except ValueError:
        sentence = f"{who} has another observation space: use a canary"
        return [*checks, at_most("live_observation_space", 1, 0, sentence)], None
    if not live.policy.spec.has_propensity:
        sentence = f"{who}: its {_NO_DENSITY}: use a canary"
        return [*checks, at_most("live_no_density", 1, 0, sentence)], None
    return checks, live.policy


def _target(policy: FoldPolicies, block: JudgedBlock, by: str) -> TargetPolicy:
    if not block.lengths.size:
        return TargetPolicy(np.empty(0))
    actions = columns_of(policy.spec.action, "actions", block.steps)
    flat = policy.spec.flattener.columns(columns_of(policy.spec.observation, "obs", block.steps))
    discrete = isinstance(policy.spec.action, Discrete)
    which = block.steps[by]
    return TargetPolicy(
        policy.logp(flat, actions, which), policy.probabilities(flat, which) if discrete else None
    )


class _InOrder:
    """Whether fold policies judge rows in the order of their training, as a bound requires."""

    def __init__(self, policy: FoldPolicies, by: str) -> None:
        self._policy, self._by, self._latest = policy, by, 0
        self.holds = policy.in_order

    def note(self, steps: SampleBatch) -> None:
        which = steps[self._by]
        if which.size:
            self.holds &= bool((np.diff(which, prepend=np.int8(self._latest)) >= 0).all())
            self._latest = int(which[-1])

    def note_of(self, *, bounded: bool) -> Diagnostic:
        number = len(self._policy.policies) - 1
        whose = "" if self._by == JUDGED_BY[0] else "the live version's "
        sentence = (
            f"{whose}rows of the training are judged by {counted(number, 'fold policy')} of it, "
            "each by one that has not seen the row; published is the one trained on all"
        )
        if bounded and not self.holds:
            sentence += ". They do not judge in the order of their training: approximate"
        return at_most("cross_fit", number, None, sentence, "policy.judging.fold_policies")


def _counted(log: JudgedLog, live: _Loaded | None) -> list[Diagnostic]:
    """Checks of the episodes that were left out before the judgement."""
    trained = log.excluded.get("in_lineage", 0)
    whom = "the candidate" if live is None else f"the candidate or live version {live.version}"
    sentence = f"{counted(trained, 'episode')} left out: {whom} was trained on them"
    none = not log.episodes
    found = [at_most("in_lineage", trained, None, sentence)]
    if not log.reserve.share or (trained and none):
        sentence = "nothing was reserved: train with --evaluation-share, or use a canary"
        source = "an episode that was trained on cannot be judged by"
        found.append(at_most("nothing_reserved", 1, 0, sentence, source))
    seen = sum(log.excluded.values()) - trained + log.episodes
    share = log.lost / max(1, seen)
    sentence = f"{counted(log.lost, 'episode')} ({share:.1%}) abandoned or broken"
    sentence += ": their return is the default reward" if log.lost else ""
    if share > MOST_LOST:
        sentence += "; fix the cause, or use a canary, which counts them"
    source = "chosen here: if the loss depends on the action, the estimate's bias is as large"
    found.append(at_most("lost_episodes", share, MOST_LOST, sentence, source))
    found += [_dropped_check(log), _late_check(log)]
    unknown = log.excluded.get("no_propensity", 0)
    share = unknown / max(1, seen)
    sentence = f"{counted(unknown, 'episode')} ({share:.1%}) without a propensity"
    if unknown:
        sentence += ": log actions with action_prob or action_logp"
    source = "chosen here: at least half of the log is to be judged by"
    found.append(at_most("no_propensity", share, MOST_WITHOUT_PROPENSITY, sentence, source))
    found.append(_not_finite_check(log, seen))
    found.append(_sampled_check(log))
    if log.reserve.cluster:
        found.append(_tag_check(log))
    elif most := log.tag_repeats.most():
        tag, repeats = most
        sentence = f"{repeats:.0f} episodes per value of `{tag}`: --cluster tag:{tag}"
        found.append(at_most("repeated_tag", repeats, None, sentence))
    if none:
        sentence = f"no episodes to judge by; left out: {log.left_out()}"
        found.append(at_most("no_episodes", 1, 0, sentence, "an empty log has no evidence"))
    return found


def _tag_check(log: JudgedLog) -> Diagnostic:
    """Check the share of judged episodes whose unit is unknown, as they lack the cluster's tag."""
    share = log.untagged / max(1, log.episodes)
    episodes = f"{counted(log.untagged, 'episode')} ({share:.1%})"
    sentence = f"{episodes} without the tag {log.reserve.tag!r}, each its own unit"
    if share > MOST_WITHOUT_TAG:
        sentence += "; log the tag with them (if they are independent, a value of its own for each)"
    source = "chosen here: if they depend on each other, the interval is too narrow"
    return at_most("without_tag", share, MOST_WITHOUT_TAG, sentence, source)


def _other_unit(
    log: JudgedLog, live: _Loaded | None, earlier: Sequence[Document]
) -> list[Diagnostic]:
    """A note if single episodes are counted, but the live version or a candidate had a tag."""
    by_tag = [
        f"candidate {one['candidate'][:12]} was judged by {one['cluster']}"
        for one in earlier
        if one.get("cluster")
    ]
    if live is not None and live.reserve.cluster:
        by_tag.append(f"live version {live.version} was trained with {live.reserve.cluster}")
    if log.reserve.cluster or not by_tag:
        return []
    sentence = f"{by_tag[-1]}; this judgement counts single episodes"
    return [at_most(OTHER_UNIT, 1, None, sentence)]


def _dropped_check(log: JudgedLog) -> Diagnostic:
    """Check the share of steps that clients dropped, as they reported it."""
    steps, episodes = log.dropped.steps, log.dropped.episodes
    share = steps / max(1, steps + log.shard_rows)
    dropped = f"{counted(steps, 'step')} ({share:.1%}) of {counted(episodes, 'episode')}"
    sentence = f"{dropped} dropped by full clients"
    if share > MOST_LOST:
        sentence += "; fix what fills their queues, then judge by later episodes (--since)"
    source = "chosen here, as lost_episodes: a full queue means high load, which may affect rewards"
    return at_most("client_dropped", share, MOST_LOST, sentence, source)


def _late_check(log: JudgedLog) -> Diagnostic:
    """Check the share of steps whose reward came after their window, as collectors counted it."""
    number, steps = log.late.total(), log.shard_rows - log.not_read.get("other_policy", 0)
    share = number / max(1, number, steps)
    sentence = f"{counted(number, 'reward')} ({share:.1%} of steps) came after the reward window"
    if share > MOST_LATE:
        by: Counter[str] = Counter()
        for kind, times in log.late.items():
            action = "" if kind.action is None else f", action {kind.action}"
            by[f"version {kind.version}, after {kind.delay}{action}"] += times
        most = ", ".join(f"{times:,} of {what}" for what, times in by.most_common(3))
        sentence += f" ({most}); set a longer reward_window, then judge by later episodes (--since)"
    source = "chosen here: steps without their reward count with the default"
    return at_most("late_rewards", share, MOST_LATE, sentence, source)


def _not_finite_check(log: JudgedLog, seen: int) -> Diagnostic:
    """Check the share of episodes that were left out for numbers beyond float32."""
    number = log.excluded.get(NOT_FINITE, 0)
    share = number / max(1, seen)
    sentence = f"{counted(number, 'episode')} ({share:.1%}) with numbers beyond float32"
    if share > MOST_LOST:
        sentence += "; log smaller numbers, then judge by later episodes (--since)"
    source = "chosen here, as lost_episodes: the numbers may depend on the action"
    return at_most(NOT_FINITE, share, MOST_LOST, sentence, source)


def _sampled_check(log: JudgedLog) -> Diagnostic:
    """Check sampled logging: `pass_prob` must not differ between episodes of one unit."""
    sentence = f"{counted(log.sampled, 'episode')} whose logging was sampled"
    if log.torn:
        sentence += f": a value of {log.reserve.cluster} has several with different pass_prob"
        sentence += "; judge without --cluster, or use a canary"
    source = "a unit's mean is biased if its episodes are logged with different probabilities"
    return at_most("sampled_log", log.sampled, 0 if log.torn else None, sentence, source)


def _certain_check(log: JudgedLog, apart: float) -> Diagnostic:
    """Check steps with propensity 1, after which the return of other actions is unknown.

    `apart` is the probability that the candidate chooses another action there. The check's value is
    `apart` times the share of episodes with such steps.
    """
    episodes = log.excluded.get("certain", 0)
    share = episodes / max(1, log.candidates)
    sentence = f"{counted(episodes, 'episode')} ({share:.1%}) with steps of probability 1 left out"
    if episodes:
        sentence += (
            f"; the candidate chooses another action in {apart:.0%} of these steps: log with "
            "exploration, or use a canary"
        )
    source = "as unsupported_near: the candidate's probability of actions that were impossible"
    return at_most("certain", share * apart, MOST_LOST, sentence, source)


# --- the estimates ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Estimating:
    """Raises ValueError for unknown estimators, and for a confidence outside (0, 1)."""

    settings: EvaluationSettings

    def __post_init__(self) -> None:
        names = self.settings.estimators
        unknown = [name for name in names or () if name not in ESTIMATORS]
        if unknown or (names is not None and not names):
            raise ValueError(f"estimators: expected names of {sorted(ESTIMATORS)}, got {unknown}")
        self._interval()

    def found(self, policy: FoldPolicies, sample: Sample, log: JudgedLog) -> dict[str, Any]:
        """The fields of a result that are for information."""
        names = self.settings.estimators or _fitting(policy.spec, log)
        taken = sample.taken(log.excluded)
        target, unavailable = self.all(policy, taken, names)
        behaviour = None
        if taken is not None:
            behaviour = self.one("v_behavior", _episodes(taken, policy))
        return {"target": tuple(target), "behaviour": behaviour, "unavailable": unavailable}

    def all(
        self, policy: FoldPolicies, log: Taken | None, names: Sequence[str]
    ) -> tuple[list[Estimate], dict[str, str]]:
        """(estimates, estimator -> why there is none)."""
        if log is None:
            return [], dict.fromkeys(names, "no episodes to judge by")
        if not policy.spec.has_propensity:
            return [], dict.fromkeys(names, _NO_DENSITY)
        fitted, why_not = None, ""
        if _NEEDS_MODEL & set(names):
            fitted, why_not = self._fit(policy, log)
        episodes = _episodes(log, policy, fitted)
        estimates, unavailable = [], {}
        for name in names:
            if why_not and name in _NEEDS_MODEL:
                unavailable[name] = why_not
                continue
            try:
                found = self.one(name, episodes)
            except ValueError as error:
                unavailable[name] = str(error)
                continue
            if found.ess < LEAST_ESS:
                found = replace(found, stderr=math.inf, interval=(-math.inf, math.inf))
            estimates.append(found)
        return estimates, unavailable

    def one(self, name: str, episodes: Episodes) -> Estimate:
        return ESTIMATORS[name](episodes, gamma=self.settings.gamma, interval=self._interval())

    def _interval(self) -> Interval:
        if self.settings.interval == "student":
            return StudentT(self.settings.confidence)
        return Bootstrap(np.random.default_rng(self.settings.seed), self.settings.confidence)

    def _fit(self, policy: FoldPolicies, log: Taken) -> tuple[CrossFitted | None, str]:
        """q and v cross-fitted over the episodes, or why there are none."""
        space = policy.spec.action
        if not isinstance(space, Discrete):
            return None, "reward models need a Discrete action space"
        folds = min(self.settings.folds, len(log.lengths))
        if folds < 2:
            return None, "cross-fitting needs 2 or more episodes"
        candidates = policy.spec.candidates

        def make() -> RewardModel:
            if candidates is not None:
                return CandidateRewardModel(space.n, candidates.width, start=space.start)
            return LinearRewardModel(space.n, start=space.start)

        return cross_fit(
            make,
            log.flat,
            log.steps["actions"],
            log.steps[REWARDS],
            policy.probabilities(log.flat, log.steps[JUDGED_BY[0]]),
            lengths=log.lengths,
            terminated=log.steps["ended"][np.cumsum(log.lengths) - 1] == "terminated",
            gamma=self.settings.gamma,
            rng=np.random.default_rng(self.settings.seed),
            folds=folds,
        ), ""


def _episodes(log: Taken, policy: FoldPolicies, fitted: CrossFitted | None = None) -> Episodes:
    """The log with the target policy's log probabilities, if any, and a fitted model's q and v."""
    actions = columns_of(policy.spec.action, "actions", log.steps)
    known = policy.spec.has_propensity
    return Episodes.from_flat(
        log.steps[REWARDS],
        lengths=log.lengths,
        behaviour_logp=log.steps[ACTION_LOGP],
        target_logp=policy.logp(log.flat, actions, log.steps[JUDGED_BY[0]]) if known else None,
        q=None if fitted is None else fitted.q,
        v=None if fitted is None else fitted.v,
        excluded=log.excluded,
        densities=not policy.spec.layout.is_discrete,
        units=log.units,
        pass_prob=None if (log.pass_prob == 1).all() else log.pass_prob,
    )


def _fitting(spec: PolicySpec, log: JudgedLog) -> tuple[str, ...]:
    if not log.one_step:
        return _ANY_LENGTH
    return _ONE_STEP if isinstance(spec.action, Discrete) else _ONE_STEP_ANY_ACTION
