"""Judge a candidate and publish it through the gate; on a frozen data set, each is done once.

    decided = publish("run", "default", digest, Gate(reward_range=(0.0, 1.0)))
    decided["published"], decided["gate"]["verdict"], decided["gate"]["reasons"]

A candidate passes the gate if it is better than the live version and the logging policy. Every
decision is recorded (storage.weights.decisions), also one without a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from policy.data.freeze import Frozen, load_frozen
from policy.data.run_once import Document, once, require_all
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.judging.evaluate import OTHER_UNIT, evaluate
from policy.judging.report import plot_intervals
from policy.judging.settings import EvaluationSettings, Gate, JudgeSettings
from policy.ope.alpha_budget import CANDIDATES
from policy.ope.comparison import BETTER
from policy.ope.reward_cap import REWARD_CAP
from policy.progress import Progress, no_progress
from policy.tracking import report_judgement
from storage.errors import WeightStoreError
from storage.objects.opening import Root, objects_at
from storage.weights.decisions import load_decisions, record

NOTED = (OTHER_UNIT, REWARD_CAP, CANDIDATES)
"""The checks that `publish` notes."""


class Numbered(Protocol):
    """The numbers of the live version."""

    @property
    def version(self) -> int: ...
    @property
    def generation(self) -> int: ...


class Elsewhere(Protocol):
    """A collector that has its own versions, such as an `ingest.client.publisher.Publisher`."""

    def live_of(self, store: WeightStore, digest: str) -> Numbered | None:
        """What is live there, if it came from this candidate of a local store."""

    def publish_candidate(self, store: WeightStore, digest: str) -> Numbered:
        """Make a candidate of a local store live there."""


WITHOUT_EXPLORATION = (
    "it acts without exploration, so its log has no rewards of other actions: the next candidate "
    "can only be judged by a canary"
)


def evaluate_once(
    root: Root,
    policy_id: str,
    candidate: str,
    frozen: Frozen,
    settings: EvaluationSettings | None = None,
    *,
    on_progress: Progress = no_progress,
) -> Document:
    """Judge a candidate on a frozen data set, unless that is recorded already.

    Returns a dict with `weights` (the full digest), `logs` (a list with the result as plain types),
    `manifest` and `unchanged`. Raises DataIncomplete, and the errors of `evaluate`.
    """
    settings = settings or EvaluationSettings()
    found = WeightStore(root, policy_id).candidate(candidate)
    candidate = found.digest
    key = {"policy_id": policy_id, "candidate": candidate, **_key(settings)}

    def work() -> Document:
        result = evaluate(
            root,
            policy_id,
            candidate,
            settings,
            manifest=frozen.streams,
            earlier=load_decisions(root, policy_id).known,
            on_progress=on_progress,
        )
        require_all(frozen, result.skipped)
        logs = [result.to_dict()]
        report_judgement(found.metrics, policy_id, logs[0])
        return {"weights": candidate, "logs": logs}

    return once(frozen, "evaluate", key, work)


def evaluate_logs(
    root: Root,
    policy_id: str,
    weights: str | int | None,
    settings: EvaluationSettings,
    *,
    others: Sequence[Root] = (),
    manifest: Path | str | None = None,
    plot: Path | None = None,
    on_progress: Progress = no_progress,
) -> Document:
    """Judge weights by the log under `root`, and by all episodes of the logs `others` (roots).

    Returns a dict with `weights`, `logs` (one result per log, as plain types) and `plot` (the path
    of a PNG, or None). With a manifest file it calls `evaluate_once`, without other logs or a plot.
    Raises ValueError for settings that exclude each other, and the errors of `evaluate`.
    """
    if manifest is not None:
        if others or plot or not isinstance(weights, str):
            raise ValueError("--manifest: expected a candidate, and neither --log nor --plot")
        if settings.schema_id is not None:
            raise ValueError("--schema-id: expected none with --manifest, which is of one schema")
        frozen = load_frozen(manifest)
        return evaluate_once(root, policy_id, weights, frozen, settings, on_progress=on_progress)
    store, earlier = WeightStore(root, policy_id), load_decisions(root, policy_id).known
    logs = [(root, settings), *((other, replace(settings, split="all")) for other in others)]
    judged = [
        evaluate(
            log,
            policy_id,
            weights,
            how,
            store=store,
            earlier=earlier,
            label=_name(log),
            on_progress=on_progress,
        )
        for log, how in logs
    ]
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_intervals(judged, plot)
    found = [result.to_dict() for result in judged]
    if isinstance(weights, str):
        report_judgement(store.candidate(weights).metrics, policy_id, found[0])
    return {"weights": weights, "logs": found, "plot": plot and str(plot)}


def _name(root: Root) -> str:
    """The last part of a root's path or address, as a label."""
    return Path(str(objects_at(root))).name


def publish(
    root: Root,
    policy_id: str,
    candidate: str,
    settings: Gate | None,
    *,
    frozen: Frozen | None = None,
    on_progress: Progress = no_progress,
    elsewhere: Elsewhere | None = None,
) -> Document:
    """Publish a candidate if the gate finds it better; `settings=None`: without a gate.

    Returns a dict: `published`, `candidate` (the full digest), its `action_rule`, `notes` on that
    and on the unit of the judgement, `gate` (the judgement; None without a gate, or if the
    candidate is live already), `already_live`, `decision` (the path of what was recorded; None if
    this version had its decision), and the live `version` and `generation` (None if it was not
    published). `elsewhere`: the collector that publishes; None: this root.

    With a frozen data set, the candidate is judged only by that, and the decision is recorded: a
    late retry returns it, without judging again and without making an older version live again. The
    dict then also has `manifest` and `unchanged`.

    Raises ValueError for invalid settings, DataIncomplete, PolicyPinned and GenerationConflict.
    """
    store = WeightStore(root, policy_id)
    found = store.candidate(candidate)
    candidate, rule = found.digest, PolicySpec.from_json(found.spec).action_rule

    def work() -> Document:
        decided = None
        if elsewhere is None:
            store.require_no_hold()  # before a look at the episodes is spent
            live = _live_of(store, candidate)
        else:
            live = elsewhere.live_of(store, candidate)
        already_live = live is not None
        if settings is not None and not already_live:
            decided = _judge(root, candidate, store, settings, frozen, on_progress)
        passed = decided is None or decided["verdict"] == BETTER
        if passed and live is None:
            there = WeightStore.publish if elsewhere is None else elsewhere.publish_candidate
            live = there(store, candidate)
        done = {
            "published": passed,
            "candidate": candidate,
            "version": live and live.version,
            "generation": live and live.generation,
            "action_rule": rule.to_json(),
            "notes": _notes(decided, explores=live is None or rule.explores),
        }
        path = None
        if not already_live or not _is_recorded(root, policy_id, done):
            kept = _kept(decided, already_live=already_live)
            path = record(root, {"policy_id": policy_id, **done, **kept})
            report_judgement(found.metrics, policy_id, {**done, **kept})
        return {**done, "already_live": already_live, "gate": decided, "decision": path}

    if frozen is None:
        return work()
    # records of the first release have a gate's `alpha_budget`, also without one
    gate = settings and {"alpha_budget": settings.alpha_budget, **_key(settings)}
    key = {"policy_id": policy_id, "candidate": candidate, "gate": gate}
    return once(frozen, "publish", key, work, lambda known: _still_numbered(store, known))


_LATER = ("reward_cap", "margin", "evaluation_share", "alpha_budget", "folds", "schema_id")


def _key(settings: JudgeSettings) -> Document:
    """The settings that identify a job; later ones only if given, so that earlier records hold."""
    own, usual = asdict(settings), asdict(type(settings)())
    own.pop("retry_for", None)
    return {name: own[name] for name in own if name not in _LATER or own[name] != usual[name]}


def _notes(decided: Document | None, *, explores: bool) -> list[str]:
    checks = [] if decided is None else decided["diagnostics"]
    found = [one["sentence"] for one in checks if one["name"] in NOTED]
    return found if explores else [*found, WITHOUT_EXPLORATION]


def _live_of(store: WeightStore, candidate: str) -> Numbered | None:
    """What is live, if it came from this candidate."""
    live = store.live()
    if live is None or store.manifest(live.version).candidate != candidate:
        return None
    return live


def _is_recorded(root: Root, policy_id: str, done: Document) -> bool:
    """Whether there is a decision on this version; a job may have been killed before it."""
    made = (done["candidate"], done["version"])
    known = load_decisions(root, policy_id).known
    return any((one.get("candidate"), one.get("version")) == made for one in known)


def _kept(decided: Document | None, *, already_live: bool) -> Document:
    """The judgement as a decision records it; `verdict` is None without one."""
    if decided is None:
        why = "it is live already" if already_live else "without a gate"
        return {"verdict": None, "reasons": [why], "rows": {}, "episodes": 0}
    return decided


def _judge(
    root: Root,
    candidate: str,
    store: WeightStore,
    settings: Gate,
    frozen: Frozen | None,
    on_progress: Progress,
) -> Document:
    """The evaluation as plain types, without the fields that the decision has itself."""
    result = evaluate(
        root,
        store.policy_id,
        candidate,
        EvaluationSettings(**asdict(settings)),
        manifest=None if frozen is None else frozen.streams,
        store=store,
        earlier=load_decisions(root, store.policy_id).known,
        on_progress=on_progress,
    )
    if frozen is not None:
        require_all(frozen, result.skipped)
    document = result.to_dict()
    return {
        name: document[name] for name in document if name not in ("policy_id", "weights", "label")
    }


def _still_numbered(store: WeightStore, known: Document) -> bool:
    """Whether the version of a decision still exists; always true if nothing was published."""
    if not known["published"]:
        return True
    try:
        return bool(store.manifest(known["version"]).candidate == known["candidate"])
    except WeightStoreError:
        return False
