"""The settings of judgements: by an estimate (`evaluate`), at the gate, and of a canary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from policy.data.log_options import (
    Cluster,
    RetryFor,
    SchemaId,
    Seed,
    SinceLive,
    Until,
)
from storage.system.backoff import RETRY_FOR
from storage.system.periods import require_period

NO_MARGIN = "0"
Split: TypeAlias = Literal["held_out", "all"]
_MarginText: TypeAlias = Annotated[
    str,
    "Better by at least this, in reward per episode or as 1% of the bar; -1%: not worse by more.",
]


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How weights are judged by a log.

    - `gamma` discounts rewards; `confidence` is of two-sided intervals.
    - `reward_range`: without limits, or with infinite ones, the verdict is approximate. A high end
      is at most the cap, so that a range of 0 to infinity is known with one.
    - `cluster`: default: as recorded with the weights. The sampling units are then the tag's
      values; each has the mean of its episodes' returns.
    - `since`, `until`: microseconds of the client's `ts`.
    """

    gamma: Annotated[float, "Discount per step."] = 1.0
    confidence: Annotated[float, "Confidence of the intervals."] = 0.95
    reward_range: Annotated[
        tuple[float, float] | None,
        "Least and most that a step can earn, such as 0 1; -inf inf: not known. Default: the "
        "policy's declaration.",
    ] = None
    reward_cap: Annotated[
        str | float | None,
        "Judge min(reward, cap) per step, as for amounts of money; auto: a cap from the first "
        "tenth of the episodes, which are then not judged.",
    ] = None
    margin: _MarginText = NO_MARGIN
    min_ess: Annotated[float, "Least effective sample size."] = 100.0
    cluster: Cluster = None
    since: SinceLive = None
    until: Until = None

    def __post_init__(self) -> None:
        require_period(self.since, self.until)


@dataclass(frozen=True, kw_only=True)
class Gate(JudgeSettings):
    """How the gate judges a candidate."""

    alpha_budget: Annotated[
        float | None,
        "Total error for all candidates judged on the same episodes; default: from the second one "
        "on, 1 - confidence.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(JudgeSettings):
    """How weights are evaluated. Raises ValueError for an unknown `split` or `interval`.

    - `evaluation_share`: the share that training held out; default: as recorded with the weights.
    - `estimators`, `interval`, `folds` and `seed` are for the estimates, which do not decide.
    - `alpha_budget`: see `policy.ope.alpha_budget`.
    """

    split: Annotated[Split, "Episodes of the root: held_out or all."] = "held_out"
    evaluation_share: float | None = None
    estimators: Annotated[Sequence[str] | None, "Estimator. May be repeated; default: all."] = None
    interval: Annotated[
        Literal["student", "bootstrap"], "Kind of interval: student or bootstrap."
    ] = "student"
    alpha_budget: float | None = None
    folds: int = 5
    schema_id: SchemaId = None
    retry_for: RetryFor = RETRY_FOR
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in ("held_out", "all"):
            raise ValueError(f"split: expected held_out or all, got {self.split!r}")
        if self.interval not in ("student", "bootstrap"):
            raise ValueError(f"interval: expected student or bootstrap, got {self.interval!r}")


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """How a canary is compared with the live version.

    - `age`: the default is twice the policy's episode timeout and its reward window: then an
      episode whose last event came within a timeout of its start is known to be abandoned.
    """

    age: Annotated[
        float | None,
        "Age in seconds at which an episode is counted, the same in each comparison; default: "
        "twice the policy's episode timeout, and its reward window.",
    ] = None
    reward_cap: Annotated[float | None, "Compare min(reward, cap) per step, as for money."] = None
    margin: _MarginText = NO_MARGIN
