"""The settings of training on a log (`train`), and on live clients (`follow`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta

from policy.data.log_options import (
    Cluster,
    RetryFor,
    SchemaId,
    Seed,
    Since,
    Until,
)
from policy.inference.action_rule import ActionRule
from storage.system.backoff import RETRY_FOR
from storage.system.periods import require_period

OnConflict: TypeAlias = Literal["reload", "end"]
_Share: TypeAlias = Annotated[
    float | None,
    "Share of episodes to hold out for evaluate; default: 0.3; with --follow: 0.",
    Meta(extra={"name": ("--evaluation-share", "--held-out")}),
]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a job trains on a log.

    - `epochs`: passes that replace the algorithm's `updates`.
    - `evaluation_share`: the share of the episodes that is reserved for evaluation. With `cluster`
      "tag:NAME" it is the share of the tag's values, each with all its episodes.
    - `cross_fit`: instead, train on all episodes, and keep fold policies that judge all but the
      first of this number of blocks (policy.training.cross_fit).
    - `schema_id`: its rows must fit the spec; rows of other schemas are counted.
    - `action_rule`: the spec's by default (`policy.training.train.acting_spec`); `explore` is set
      in it.
    - `checkpoint`: a file for the learner's state and the reader's position.
    - `threads`: more than one slows down a collector on the same machine.
    - `retry_for`: a shard that stays damaged is left out and named in `skipped`.
    """

    epochs: Annotated[int | None, "Passes over the log, not updates."] = None
    evaluation_share: _Share = None
    cross_fit: Annotated[
        int | None,
        "Train on all episodes, and keep policies of the first of this many blocks, so that all "
        "but the first block judge.",
    ] = None
    cluster: Cluster = None
    since: Since = None
    until: Until = None
    schema_id: SchemaId = None
    action_rule: Annotated[
        ActionRule | None,
        "Action rule: sample[:temperature], epsilon_greedy[:epsilon], squarecb[:gamma] or greedy, "
        "each also with +explore:SHARE; default: the declared one, or the algorithm's.",
        Meta(extra={"parse": ActionRule.parse}),
    ] = None
    explore: Annotated[
        float | None,
        "Floor of any action rule: the probability with which an action is any of the allowed "
        "ones, so that other policies can be judged.",
        Meta(ge=0, le=1),
    ] = None
    checkpoint: Annotated[Path | str | None, "The learner's checkpoint file."] = None
    threads: Annotated[int, "Threads of torch."] = 1
    retry_for: RetryFor = RETRY_FOR
    seed: Seed = 0

    def __post_init__(self) -> None:
        require_period(self.since, self.until)


@dataclass(frozen=True, kw_only=True)
class FollowSettings:
    """How a job trains on live clients. Raises ValueError for values out of range.

    - `steps_per_update`: the on-policy steps of an update. It has fewer if a collector holds the
      policy and nothing more can be read.
    - `max_lag`: rows whose policy lag is larger are left out as "stale".
    - `evaluation_share` and `cluster`: as in `TrainSettings`. Rows of reserved episodes count
      towards an update, but are left out as "reserved". By default none are reserved, because
      versions go live without a judgement.
    - `publish`: without it (and while a rollback pins the policy), a candidate is stored every
      `checkpoint_every` updates and nothing goes live.
    - `checkpoint_dir`: a local folder, by default `weights/{id}/checkpoints`. With `resume`, the
      job continues from the latest intact checkpoint; if there is none, from the live weights.
    - `keep_versions`: every `checkpoint_every` updates, older versions than these are removed.
    - `on_conflict`: if another process publishes or rolls back, continue from its weights or end.
    """

    steps_per_update: Annotated[int, "With --follow: steps per update."] = 256
    max_lag: Annotated[
        int | None, "With --follow: train on steps at most this many versions behind."
    ] = None
    evaluation_share: _Share = None
    cluster: Cluster = None
    publish: bool = True
    checkpoint_dir: Path | str | None = None
    checkpoint_every: int = 10
    keep_versions: int = 32
    on_conflict: Annotated[
        OnConflict,
        "With --follow, if another publisher makes weights live: reload them, or end.",
    ] = "reload"
    lease_wait: Annotated[float, "With --follow: seconds to wait for another trainer to end."] = 0.0
    resume: Annotated[bool, "With --follow: resume from the checkpoint, or start anew."] = True
    threads: int = 1
    seed: Seed = 0

    def __post_init__(self) -> None:
        for name in ("steps_per_update", "checkpoint_every", "keep_versions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)!r}")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_lag: expected 0 or more, or None, got {self.max_lag!r}")
        if self.on_conflict not in get_args(OnConflict):
            raise ValueError(f"on_conflict: expected reload or end, got {self.on_conflict!r}")
