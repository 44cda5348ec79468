"""A scorecard: every policy's live version judged by its log, and the checks of the log."""

from __future__ import annotations

from typing import Any

from policy.inference.weight_store import WeightStore
from policy.judging.gate import evaluate_logs
from policy.judging.log_review import review
from policy.judging.settings import EvaluationSettings
from policy.progress import Progress, no_progress
from storage.declarations.policy_files import load_declarations
from storage.errors import StorageError
from storage.objects.opening import Root, objects_at


def scorecard(
    root: Root, settings: EvaluationSettings, *, on_progress: Progress = no_progress
) -> dict[str, dict[str, Any]]:
    """Policy -> `version`, `generation`, `logs` (as of `evaluate_logs`), `checks` and `error`.

    `error` says why a policy could not be judged, as before its first version: `logs` is then
    empty. The `checks` of a log need no version.
    """
    known = {name.rstrip("/") for name in objects_at(root).under("weights").names()}
    return {
        policy_id: _judged(root, policy_id, settings, on_progress)
        for policy_id in sorted({*load_declarations(root), *known})
    }


def _judged(
    root: Root, policy_id: str, settings: EvaluationSettings, on_progress: Progress
) -> dict[str, Any]:
    found: dict[str, Any] = {"version": None, "generation": None, "logs": [], "checks": []}
    try:
        live = WeightStore(root, policy_id).live()
        if live is not None:
            found |= {"version": live.version, "generation": live.generation}
        checks = review(root, policy_id, retry_for=settings.retry_for, on_progress=on_progress)
        found["checks"] = [one.to_dict() for one in checks]
        judged = evaluate_logs(root, policy_id, None, settings, on_progress=on_progress)
        found["logs"] = judged["logs"]
    except (StorageError, ValueError, OSError) as error:
        return {**found, "error": str(error)}
    return {**found, "error": None}
