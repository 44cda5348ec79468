"""The result of an evaluation, and a plot of it.

result.judgement.verdict                    # "better", "worse" or "cannot tell"
plot_intervals([result, other], Path("intervals.png"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from policy.judging.settings import Split
from policy.ope.estimators import Estimate
from policy.ope.judgement import Judgement


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of `evaluate`. Values are returns per episode, discounted by `gamma`."""

    policy_id: str
    weights: str | int  # candidate digest or version
    label: str  # for tables and plots
    split: Split
    evaluation_share: float  # of episodes or clusters, that training reserved
    cluster: str  # the sampling unit: "" an episode, "tag:NAME" a value of the tag
    since: int | None  # microseconds: only episodes that began from then on, before `until`
    until: int | None
    after_live: int | None  # only episodes newer than this live version's training
    gamma: float
    confidence: float
    reward_range: tuple[float, float] | None  # of a step's reward
    reward_cap: float | None  # judged was min(reward, cap)
    margin: str  # in reward per episode, or a share of the bar such as "1%"
    live: int | None  # the live version that was a bar
    looks: int  # earlier judgements of these weights, on fewer of these episodes
    others: int  # other candidates that were judged on overlapping rows
    judgement: Judgement  # better, worse, or cannot tell, and what is missing
    episodes: int  # used
    rows: Mapping[str, Sequence[int]]  # stream -> first and last ordinal used
    excluded: Mapping[str, int]  # reason -> episodes not used
    not_read: Mapping[str, int]  # reason -> steps in the shards that do not belong here
    skipped: Mapping[str, str]  # damaged shard -> reason
    # For information; these do not decide.
    target: tuple[Estimate, ...] = ()  # of the weights, one per estimator
    behaviour: Estimate | None = None  # of the logging policy, if there are episodes
    unavailable: Mapping[str, str] = field(default_factory=dict)  # estimator -> why it is missing

    @property
    def ess(self) -> float:
        """Effective sample size of the whole-episode importance weights."""
        weighing = [one.ess for one in self.target if one.name != "dm"]
        return min(weighing, default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain types for strict JSON; numbers that are not finite become None."""
        return {
            "policy_id": self.policy_id,
            "weights": self.weights,
            "label": self.label,
            "split": self.split,
            "evaluation_share": self.evaluation_share,
            "cluster": self.cluster,
            "since": self.since,
            "until": self.until,
            "after_live": self.after_live,
            "gamma": self.gamma,
            "confidence": self.confidence,
            "reward_range": self.reward_range and list(self.reward_range),
            "reward_cap": self.reward_cap,
            "margin": self.margin,
            "live": self.live,
            "looks": self.looks,
            "others": self.others,
            **self.judgement.to_dict(),
            "target": [one.to_dict() for one in self.target],
            "behaviour": self.behaviour and self.behaviour.to_dict(),
            "episodes": self.episodes,
            "rows": {stream: list(ends) for stream, ends in self.rows.items()},
            "ess": float(self.ess) if np.isfinite(self.ess) else None,
            "excluded": dict(self.excluded),
            "not_read": dict(self.not_read),
            "unavailable": dict(self.unavailable),
            "skipped": dict(self.skipped),
        }


# --- the picture -----------------------------------------------------------------------------


def plot_intervals(results: Sequence[EvaluationResult], path: Path) -> None:
    """Write a PNG of all estimates with their intervals, including the logging policies'.

    Each result has its colour. Needs matplotlib (the [train] extra). Raises ValueError without
    results, and OSError.
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
        if estimate is not None
    ]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for y, (_, estimate, colour) in enumerate(bars):
        if np.isfinite(estimate.interval).all():  # an infinite one cannot be drawn
            axes.plot(estimate.interval, [y, y], color=colour, linewidth=2)
        axes.plot([estimate.value], [y], "o", color=colour)
    axes.set_yticks(range(len(bars)), [text for text, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel(f"value per episode, with {results[0].confidence:.0%} intervals")
    axes.grid(axis="x", alpha=0.3)
    first, counts = results[0], ", ".join(f"{one.label} n={one.episodes:,}" for one in results)
    axes.set_title(f"{first.policy_id} {str(first.weights)[:12]}: {counts} episodes")
    figure.savefig(path, format="png", dpi=120)
