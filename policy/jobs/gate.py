"""Judging a candidate and publishing it through the gate; on a frozen data set, each done once.

decided = publish("run", "default", digest, Gate(reward_range=(0.0, 1.0)))
decided["published"], decided["gate"]["verdict"], decided["gate"]["reasons"]

The gate lets a candidate pass that is better than the live version and than the logging policy.
Every decision is written down (policy.jobs.decisions), one without a gate too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.jobs.decisions import load_decisions, record
from policy.jobs.evaluate import evaluate
from policy.jobs.freeze import Frozen, load_frozen
from policy.jobs.report import Split, plot_intervals
from policy.jobs.run_once import Document, once, require_all
from policy.ope.comparison import BETTER
from policy.progress import Progress, no_progress
from storage.errors import WeightStoreError
from storage.reading.retries import RETRY_FOR


class Numbered(Protocol):
    """What is live now."""

    @property
    def version(self) -> int: ...
    @property
    def generation(self) -> int: ...


MakeLive: TypeAlias = Callable[[WeightStore, str], Numbered]
"""Makes a store's candidate, by its digest, the live version: here or elsewhere."""

__all__ = ["WITHOUT_EXPLORATION", "Gate", "evaluate_logs", "evaluate_once", "publish"]


WITHOUT_EXPLORATION = (
    "it acts without exploring, so that its log says nothing of what other actions earn: the next "
    "candidate can then only be judged by a canary"
)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a candidate is judged by; `policy.jobs.evaluate.evaluate` says what each means."""

    min_ess: float = 100.0
    confidence: float = 0.95
    gamma: float = 1.0
    reward_range: tuple[float, float] | None = None
    alpha_budget: float | None = None
    cluster: str | None = None
    since: int | None = None
    until: int | None = None


def evaluate_once(
    root: Path | str,
    policy_id: str,
    candidate: str,
    frozen: Frozen,
    *,
    retry_for: float = RETRY_FOR,
    on_progress: Progress = no_progress,
    **settings: Any,
) -> Document:
    """`policy.jobs.evaluate.evaluate` of a candidate on a frozen data set, unless it was done.

    `settings` are those of `evaluate`, plain values all. Gives `weights` (the
    whole digest), `logs` (the one result as plain types), `manifest` and `unchanged`. Raises
    DataIncomplete.
    """
    candidate = WeightStore(root, policy_id).candidate(candidate).digest
    key = {"policy_id": policy_id, "candidate": candidate, **settings}

    def work() -> Document:
        result = evaluate(
            root,
            policy_id,
            candidate,
            manifest=frozen.streams,
            earlier=load_decisions(root, policy_id).known,
            retry_for=retry_for,
            on_progress=on_progress,
            **settings,
        )
        require_all(frozen, result.skipped)
        return {"weights": candidate, "logs": [result.to_dict()]}

    return once(frozen, "evaluate", key, work)


def evaluate_logs(
    root: Path | str,
    policy_id: str,
    weights: str | int | None,
    *,
    others: Sequence[Path] = (),
    manifest: Path | None = None,
    plot: Path | None = None,
    split: Split = "held_out",
    retry_for: float = RETRY_FOR,
    on_progress: Progress = no_progress,
    **settings: Any,
) -> Document:
    """Judge weights by the log under `root`, and by all episodes of the `others`: one table.

    Gives `weights`, `logs` (an evaluation each, as plain types) and `plot`, the PNG that was asked
    for. With a manifest file it is `evaluate_once`, which takes neither others nor a plot. Raises
    ValueError for settings that do not fit each other, and what `evaluate` raises.
    """
    if manifest is not None:
        if others or plot or not isinstance(weights, str):
            raise ValueError("--manifest: expected a candidate, and neither --log nor --plot")
        if settings.pop("schema_id", None) is not None:
            raise ValueError("--schema-id: expected none with --manifest, which is of one schema")
        frozen, settings = load_frozen(manifest), {"split": split, **settings}
        told: dict[str, Any] = {"retry_for": retry_for, "on_progress": on_progress}
        return evaluate_once(root, policy_id, weights, frozen, **told, **settings)
    store = WeightStore(root, policy_id)
    shared = {
        "store": store,
        "earlier": load_decisions(root, policy_id).known,
        "retry_for": retry_for,
        "on_progress": on_progress,
        **settings,
    }
    judged = [
        evaluate(root, policy_id, weights, split=split, label=Path(root).name, **shared),
        *(
            evaluate(other, policy_id, weights, split="all", label=other.name, **shared)
            for other in others
        ),
    ]
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_intervals(judged, plot)
    logs = [result.to_dict() for result in judged]
    return {"weights": weights, "logs": logs, "plot": plot and str(plot)}


def publish(
    root: Path | str,
    policy_id: str,
    candidate: str,
    settings: Gate | None,
    *,
    frozen: Frozen | None = None,
    on_progress: Progress = no_progress,
    make_live: MakeLive = WeightStore.publish,
) -> Document:
    """Make a candidate live if it is better; without `settings` there is no gate.

    Gives `published`, `candidate`, its `action_rule`, `notes` on what follows from that, `gate`
    (None without one, or when the candidate is live already), `decision` (the file that keeps it),
    and of what is live now `version` and `generation` (None when refused). With a frozen data set
    the candidate is judged by that alone, and the decision is kept: a late retry neither brings
    back a version that another one has followed, nor asks again; `manifest` and `unchanged` stand
    in the answer. `make_live` publishes elsewhere than in the root. Raises ValueError for settings
    that do not fit, DataIncomplete, GenerationConflict.
    """
    store = WeightStore(root, policy_id)
    found = store.candidate(candidate)
    candidate, rule = found.digest, PolicySpec.from_json(found.spec).action_rule

    def work() -> Document:
        decided = None
        if settings is not None and not _is_live(store, candidate):
            decided = _judge(root, candidate, store, settings, frozen, on_progress)
        passed = decided is None or decided["verdict"] == BETTER
        live = make_live(store, candidate) if passed else None
        done = {
            "published": passed,
            "candidate": candidate,
            "version": live and live.version,
            "generation": live and live.generation,
            "action_rule": rule.to_json(),
            "notes": [] if live is None or rule.explores else [WITHOUT_EXPLORATION],
        }
        path = record(root, {"policy_id": policy_id, **done, **_kept(decided, settings)})
        return {**done, "gate": decided, "decision": str(path)}

    if frozen is None:
        return work()
    key = {"policy_id": policy_id, "candidate": candidate, "gate": settings and asdict(settings)}
    return once(frozen, "publish", key, work, lambda known: _still_numbered(store, known))


def _is_live(store: WeightStore, candidate: str) -> bool:
    live = store.live()
    return live is not None and store.manifest(live.version).candidate == candidate


def _kept(decided: Document | None, settings: Gate | None) -> Document:
    """What a decision's file says of the judgement; without one `verdict` is None."""
    if decided is None:
        why = "without a gate" if settings is None else "it is live already"
        return {"verdict": None, "reasons": [why], "rows": {}, "episodes": 0}
    return decided


def _judge(
    root: Path | str,
    candidate: str,
    store: WeightStore,
    settings: Gate,
    frozen: Frozen | None,
    on_progress: Progress,
) -> Document:
    """The evaluation's document, less what is of the whole decision."""
    result = evaluate(
        root,
        store.policy_id,
        candidate,
        manifest=None if frozen is None else frozen.streams,
        store=store,
        earlier=load_decisions(root, store.policy_id).known,
        on_progress=on_progress,
        **asdict(settings),
    )
    if frozen is not None:
        require_all(frozen, result.skipped)
    told = result.to_dict()
    return {name: told[name] for name in told if name not in ("policy_id", "weights", "label")}


def _still_numbered(store: WeightStore, known: Document) -> bool:
    """Whether the version of a decision exists; a refusal stands by itself."""
    if not known["published"]:
        return True
    try:
        return bool(store.manifest(known["version"]).candidate == known["candidate"])
    except WeightStoreError:
        return False
