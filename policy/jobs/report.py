"""What an evaluation found, whether it is good enough to publish, and a picture of it.

decision = gate(result, min_ess=100)
decision.passed, decision.reasons
plot_intervals([result, other], Path("intervals.png"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from policy.ope.estimators import Estimate

__all__ = [
    "HELD_OUT",
    "EvaluationError",
    "EvaluationResult",
    "GateDecision",
    "gate",
    "plot_intervals",
]

Split: TypeAlias = Literal["held_out", "all"]

HELD_OUT = 0.3
"""The share of episodes that training leaves to evaluation unless told otherwise."""


class EvaluationError(ValueError):
    """Nothing can be said about these weights; the text says why."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What was found. Values are returns per episode, discounted by `gamma`."""

    policy_id: str
    weights: str | int  # candidate digest or version
    label: str  # for tables and plots
    split: Split
    held_out: float  # the share that training held out
    gamma: float
    confidence: float
    target: tuple[Estimate, ...]  # of the weights, one an estimator
    behaviour: Estimate  # of the logging policy, over the same episodes
    episodes: int  # used
    excluded: Mapping[str, int]  # why -> episodes not used
    not_read: Mapping[str, int]  # why -> steps of the shards that are none of this evaluation
    unavailable: Mapping[str, str]  # estimator -> why it could not be computed
    skipped: Mapping[str, str]  # damaged shard -> why

    @property
    def ess(self) -> float:
        """Effective sample size of the whole-episode importance weights."""
        weighing = [one.ess for one in self.target if one.name != "dm"]
        return min(weighing, default=0.0)

    def estimate(self, name: str | None = None) -> Estimate:
        """The estimate of that name; by default dr, else the self-normalised one, else the first.

        Raises KeyError with the names that exist.
        """
        found = {one.name: one for one in self.target}
        if name is None:
            name = next((n for n in ("dr", "snips", "cwpdis") if n in found), next(iter(found)))
        if name not in found:
            raise KeyError(f"expected one of the estimates {list(found)}, got {name!r}")
        return found[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON; a number that is not finite becomes None."""
        return {
            "policy_id": self.policy_id,
            "weights": self.weights,
            "label": self.label,
            "split": self.split,
            "held_out": self.held_out,
            "gamma": self.gamma,
            "confidence": self.confidence,
            "target": [one.to_dict() for one in self.target],
            "behaviour": self.behaviour.to_dict(),
            "episodes": self.episodes,
            "ess": float(self.ess) if np.isfinite(self.ess) else None,
            "excluded": dict(self.excluded),
            "not_read": dict(self.not_read),
            "unavailable": dict(self.unavailable),
            "skipped": dict(self.skipped),
        }


# --- the gate --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """Whether weights may be published, and every reason against it (none when passed)."""

    passed: bool
    estimator: str
    baseline: float
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {
            "passed": self.passed,
            "estimator": self.estimator,
            "baseline": self.baseline,
            "reasons": list(self.reasons),
        }


def gate(
    result: EvaluationResult,
    *,
    min_ess: float,
    baseline: float | Literal["behaviour"] = "behaviour",
    rule: Literal["lower_bound", "value"] = "lower_bound",
    estimator: str | None = None,
) -> GateDecision:
    """Decide by one estimate (see `EvaluationResult.estimate`) whether the weights are better.

    Passes when the effective sample size is at least `min_ess` and the lower end of the interval
    (rule "value": the estimate itself) lies above the baseline: the logging policy's value over the
    same episodes, or a number.
    """
    if rule not in ("lower_bound", "value"):
        raise ValueError(f"rule: expected lower_bound or value, got {rule!r}")
    chosen = result.estimate(estimator)
    limit = result.behaviour.value if baseline == "behaviour" else float(baseline)
    reached = chosen.interval[0] if rule == "lower_bound" else chosen.value
    what = "the lower end of its interval" if rule == "lower_bound" else "its value"
    reasons = []
    # Written so that a NaN fails.
    if not result.ess >= min_ess:
        reasons.append(f"effective sample size: expected {min_ess:g} or more, got {result.ess:.1f}")
    if not reached > limit:
        reasons.append(
            f"{chosen.name}: expected {what} above the baseline {limit:.6g}, got {reached:.6g}"
        )
    return GateDecision(
        passed=not reasons, estimator=chosen.name, baseline=limit, reasons=tuple(reasons)
    )


# --- the picture -----------------------------------------------------------------------------


def plot_intervals(results: Sequence[EvaluationResult], path: Path) -> None:
    """Write a PNG of all estimates with their intervals, the logging policies' too.

    One colour a result. Needs matplotlib (the [train] extra).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  [train] extra
    from matplotlib.figure import Figure  # noqa: PLC0415  [train] extra

    if not results:
        raise ValueError("plot_intervals: expected one or more results, got none")
    bars = [
        (f"{result.label}: {name}", estimate, f"C{number}")
        for number, result in enumerate(results)
        for name, estimate in [
            ("logging policy", result.behaviour),
            *((one.name, one) for one in result.target),
        ]
    ]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for y, (_, estimate, colour) in enumerate(bars):
        if np.isfinite(estimate.interval).all():  # one without end would hide the others
            axes.plot(estimate.interval, [y, y], color=colour, linewidth=2)
        axes.plot([estimate.value], [y], "o", color=colour)
    axes.set_yticks(range(len(bars)), [text for text, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel(f"value per episode, with {results[0].confidence:.0%} intervals")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
