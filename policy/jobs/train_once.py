"""`train_once`: the training job on a frozen data set, done once (policy.jobs.run_once)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from policy.algorithms.base import AlgorithmConfig
from policy.inference.action_rule import ActionRule
from policy.inference.weight_store import WeightStore
from policy.jobs.freeze import Frozen
from policy.jobs.report import HELD_OUT
from policy.jobs.run_once import Document, once, require_all
from policy.jobs.train import train
from policy.progress import Progress, no_progress
from storage.declarations.policy_files import load_declarations
from storage.errors import WeightStoreError
from storage.reading.retries import RETRY_FOR

__all__ = ["train_once"]


def train_once(
    root: Path | str,
    policy_id: str,
    algorithm: AlgorithmConfig,
    frozen: Frozen,
    *,
    action_rule: ActionRule | None = None,
    evaluation_share: float = HELD_OUT,
    cluster: str = "",
    since: int | None = None,
    until: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    threads: int = 1,
    retry_for: float = RETRY_FOR,
    on_progress: Progress = no_progress,
) -> Document:
    """`policy.jobs.train.train` on a frozen data set, unless its candidate is there already.

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
        "evaluation_share": evaluation_share,
        "cluster": cluster,
        "since": since,
        "until": until,
        "seed": seed,
    }
    if action_rule is not None:
        key["action_rule"] = action_rule.to_json()
    store = WeightStore(root, policy_id)

    def work() -> Document:
        result = train(
            root,
            policy_id,
            config,
            action_rule=action_rule,
            evaluation_share=evaluation_share,
            cluster=cluster,
            since=since,
            until=until,
            seed=seed,
            manifest=frozen.streams,
            checkpoint=checkpoint,
            threads=threads,
            retry_for=retry_for,
            on_progress=on_progress,
        )
        require_all(frozen, result.skipped)
        return result.to_dict()

    return once(frozen, "train", key, work, lambda known: _is_there(store, known["candidate"]))


def _is_there(store: WeightStore, candidate: str) -> bool:
    try:
        store.load_candidate(candidate)
    except WeightStoreError:
        return False
    return True
