"""Jobs on a frozen data set, each done once: what a scheduler may retry at will.

    frozen = freeze("run")
    trained = train_once("run", "default", BanditConfig(), frozen, seed=7)
    train_once("run", "default", BanditConfig(), frozen, seed=7)["unchanged"]     # True
    publish_once("run", "default", trained["candidate"], frozen, Gate(min_ess=100))

Beside its manifest every job keeps a record, `{hash}.{job}-{key}.json`, written when it succeeded;
the key covers all that its result depends on. A job holds a lock while it works, which the kernel
drops when the process dies: of two that run at once the second waits, finds the record, and does
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from policy.algorithms.algorithm import AlgorithmConfig
from policy.evaluate import evaluate
from policy.evaluation import HELD_OUT, gate
from policy.freeze import HASH_DIGITS, Frozen
from policy.progress import Progress, no_progress
from policy.train import train
from storage.errors import WeightStoreError
from storage.files import FileLock, make_directory, replace_file
from storage.manifest import canonical, sha256
from storage.policy_files import load_declarations
from storage.weights import WeightStore

__all__ = ["DataIncomplete", "Gate", "evaluate_once", "publish_once", "train_once"]

Document: TypeAlias = dict[str, Any]


class DataIncomplete(ValueError):
    """Shards of the manifest could not be read; the text names them."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The settings of `policy.evaluation.gate`."""

    min_ess: float = 100.0
    baseline: float | Literal["behaviour"] = "behaviour"
    rule: Literal["lower_bound", "value"] = "lower_bound"
    estimator: str | None = None


def train_once(
    root: Path | str,
    policy_id: str,
    algorithm: AlgorithmConfig,
    frozen: Frozen,
    *,
    held_out: float = HELD_OUT,
    epochs: int | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    threads: int = 1,
    on_progress: Progress = no_progress,
) -> Document:
    """`policy.train.train` on a frozen data set, unless its candidate is there already.

    Gives the result as plain types, with `manifest` (the hash) and `unchanged`. Raises
    DataIncomplete, after training but before it is recorded, when a shard was skipped.
    """
    config = algorithm if epochs is None else replace(algorithm, epochs=epochs)
    declaration = load_declarations(Path(root)).get(policy_id)
    key = {
        "policy_id": policy_id,
        "spec": declaration and declaration.spec,
        "algorithm": type(config).__name__,
        "config": asdict(config),
        "held_out": held_out,
        "seed": seed,
    }
    store = WeightStore(root, policy_id)

    def work() -> Document:
        result = train(
            root,
            policy_id,
            config,
            held_out=held_out,
            seed=seed,
            manifest=frozen.streams,
            checkpoint=checkpoint,
            threads=threads,
            on_progress=on_progress,
        )
        _require_all(frozen, result.skipped)
        return result.to_dict()

    return _once(frozen, "train", key, work, lambda known: _is_there(store, known["candidate"]))


def evaluate_once(
    root: Path | str,
    policy_id: str,
    candidate: str,
    frozen: Frozen,
    *,
    on_progress: Progress = no_progress,
    **settings: Any,
) -> Document:
    """`policy.evaluate.evaluate` of a candidate on a frozen data set, unless it was done.

    `settings` are those of `evaluate`, plain values all. Gives the result as plain types, with
    `manifest` and `unchanged`. Raises DataIncomplete.
    """
    candidate = WeightStore(root, policy_id).candidate(candidate).digest
    key = {"policy_id": policy_id, "candidate": candidate, **settings}

    def work() -> Document:
        result = evaluate(
            root,
            policy_id,
            candidate,
            manifest=frozen.streams,
            on_progress=on_progress,
            **settings,
        )
        _require_all(frozen, result.skipped)
        return result.to_dict()

    return _once(frozen, "evaluate", key, work)


def publish_once(
    root: Path | str,
    policy_id: str,
    candidate: str,
    frozen: Frozen,
    settings: Gate | None = None,
    *,
    on_progress: Progress = no_progress,
) -> Document:
    """Publish a candidate if the gate lets it pass on the frozen data set; keep what was decided.

    Gives `published`, `candidate`, `gate`, `version` and `generation` (None when refused),
    `manifest` and `unchanged`. A decision stands: a late retry neither brings back a version that
    another one has followed, nor asks again. Raises DataIncomplete, GenerationConflict.
    """
    settings = settings or Gate()
    store = WeightStore(root, policy_id)
    candidate = store.candidate(candidate).digest
    key = {"policy_id": policy_id, "candidate": candidate, **asdict(settings)}

    def work() -> Document:
        result = evaluate(
            root, policy_id, candidate, manifest=frozen.streams, on_progress=on_progress
        )
        _require_all(frozen, result.skipped)
        try:
            decision = gate(result, **asdict(settings))
        except KeyError as error:
            raise ValueError(f"estimator: {error.args[0]}") from error
        live = store.publish(candidate) if decision.passed else None
        return {
            "published": decision.passed,
            "policy_id": policy_id,
            "candidate": candidate,
            "version": live and live.version,
            "generation": live and live.generation,
            "gate": decision.to_dict(),
        }

    return _once(frozen, "publish", key, work, lambda known: _still_numbered(store, known))


def _once(
    frozen: Frozen,
    job: str,
    key: Mapping[str, Any],
    work: Callable[[], Document],
    holds: Callable[[Document], bool] = lambda known: True,
) -> Document:
    """The record of a job, or what `work` gives, recorded. `holds`: whether a record still does."""
    name = f"{frozen.hash}.{job}-{sha256(canonical(dict(key), job))[:HASH_DIGITS]}"
    folder = frozen.path.parent
    make_directory(folder)
    path = folder / f"{name}.json"
    with FileLock(folder / f".{name}.lock"):
        known = _read(path)
        if known is not None and holds(known):
            return {**known, "unchanged": True}
        done = {**work(), "manifest": frozen.hash}
        replace_file(path, json.dumps(done, indent=1, allow_nan=False).encode() + b"\n")
        return {**done, "unchanged": False}


def _read(path: Path) -> Document | None:
    """A record; None when there is none, or one that is no record (it is then made anew)."""
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _is_there(store: WeightStore, candidate: str) -> bool:
    try:
        store.load_candidate(candidate)
    except WeightStoreError:
        return False
    return True


def _still_numbered(store: WeightStore, known: Document) -> bool:
    """Whether the version of a decision exists; a refusal stands by itself."""
    if not known["published"]:
        return True
    try:
        return bool(store.manifest(known["version"]).candidate == known["candidate"])
    except WeightStoreError:
        return False


def _require_all(frozen: Frozen, skipped: Mapping[str, str]) -> None:
    if skipped:
        listed = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise DataIncomplete(f"manifest {frozen.hash}: shards could not be read: {listed}")
