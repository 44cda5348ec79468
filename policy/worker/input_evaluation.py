"""Estimates of the worker's policy from the episodes of its input.

Only whole episodes are used: fragments wait, over any number of batches, until all of them are
there. Episodes that were abandoned or broken, and those with numbers beyond float32, are excluded
and counted. The names of estimators are those of policy.ope.estimators; the worker itself handles
"simulation".
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from policy.algorithms.trainable_policy import TrainablePolicy
from policy.inference.finite import NOT_FINITE, not_finite
from policy.ope.cross_fitting import CrossFitted, cross_fit
from policy.ope.episodes import NOT_WHOLE, Episodes
from policy.ope.estimators import ESTIMATORS, v_behavior
from policy.ope.value_models import LinearRewardModel
from policy.sampling.fragment_buffers import CUT
from policy.sampling.metrics import OffPolicyEstimate
from policy.sampling.sampler import FRAGMENT_CUT
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import (
    ACTION_LOGP,
    AGENT_ID,
    EPISODE_ORDINAL,
    EPS_ID,
    REWARDS,
    STREAM,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    T,
    concat_samples,
)
from storage.spaces.descriptors import Discrete
from storage.wording import counted

_log = logging.getLogger("headrace.worker")

SIMULATION = "simulation"
_ALIASES: Mapping[str, str] = {"wis_pd": "cwpdis", "is_pd": "pdis"}
_NEED_MODEL = {"dm", "dr", "sndr", "switch_dr", "dr_os"}
_NEED_NO_PROPENSITY = {"dm", "v_behavior"}
_ENDED, _PASS_PROB = "ended", "pass_prob"
_FOLDS = 5
# the oldest episodes without an end are dropped beyond this number of rows
_MOST_ROWS = 1_000_000


def _ends(run: SampleBatch) -> bool:
    """Whether an episode ends with these rows.

    Either the end is recorded, or `cut` shows an end that is not (a soft horizon,
    `no_done_at_end`).
    """
    cut = int(run[CUT][-1]) if CUT in run else 0
    return bool(run[TERMINATEDS][-1] or run[TRUNCATEDS][-1]) or cut > FRAGMENT_CUT


def check_methods(methods: Collection[str]) -> tuple[str, ...]:
    """Check the methods' names. Raises ValueError for an unknown one."""
    if isinstance(methods, str):
        raise ValueError(f"input_evaluation: expected a list of names, got {methods!r}")
    for name in methods:
        if name != SIMULATION and _ALIASES.get(name, name) not in ESTIMATORS:
            known = ", ".join([SIMULATION, *_ALIASES, *ESTIMATORS])
            raise ValueError(f"Unknown evaluation method: {name}; expected one of {known}")
    return tuple(methods)


@dataclass
class _CompleteEpisodes:
    """Complete episodes: rows one episode after the other, S in all."""

    rows: SampleBatch
    lengths: npt.NDArray[np.int64]
    excluded: Mapping[str, int]  # reason -> episodes

    @classmethod
    def of(cls, episodes: Sequence[SampleBatch]) -> _CompleteEpisodes:
        """Join episodes, without those that estimators exclude."""
        excluded: Counter[str] = Counter()
        kept = []
        for rows in episodes:
            reason = _why_excluded(rows)
            if reason is None:
                kept.append(rows)
            else:
                excluded[reason] += 1
        joined = concat_samples(kept) if kept else episodes[0].slice(0, 0)
        return cls(joined, np.array([one.count for one in kept], np.int64), excluded)


def _why_excluded(rows: SampleBatch) -> str | None:
    """Why an episode is excluded; None for one that is used. Sampled rows have no `ended`."""
    ended = rows[_ENDED][-1] if _ENDED in rows else None
    if ended in NOT_WHOLE:
        return str(ended)
    return NOT_FINITE if not_finite(rows, (REWARDS,), "obs", "actions").any() else None


class InputEvaluation:
    """Collects whole episodes of one policy, and evaluates the policy as it is at the call.

    `gamma` is the discount. The metrics of an estimate are those of `Estimate.to_dict`; `v_old`,
    the logging policy's value by the same episodes (None without any); `v_gain`, the quotient of
    both; and `unavailable`, why an estimator has no result. `open_rows` wait for their episode's
    end; parts of `given_up` episodes never came. `columns` are those of the input that it reads.
    """

    columns: ClassVar[tuple[str, ...]] = (
        *("obs", "actions", REWARDS, TERMINATEDS, TRUNCATEDS, ACTION_LOGP),
        *(EPS_ID, AGENT_ID, _ENDED, _PASS_PROB),
    )

    def __init__(self, methods: Collection[str], policy: TrainablePolicy, gamma: float) -> None:
        self.methods = [name for name in check_methods(methods) if name != SIMULATION]
        self._policy, self._gamma = policy, gamma
        self._open: OrderedDict[tuple[Any, ...], list[SampleBatch]] = OrderedDict()
        self._open_rows = 0
        self._whole: list[SampleBatch] = []
        self.given_up = 0  # episodes
        self._asked = True  # whether `estimates` was called since the latest rows

    def add(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Add a batch of the input.

        Raises NotImplementedError for several policies, and ValueError if no row has a propensity.
        """
        if isinstance(batch, MultiAgentBatch):
            raise NotImplementedError(
                "input_evaluation: expected the batches of a single policy, got a MultiAgentBatch; "
                "judge each policy's log by policy.judging.evaluate"
            )
        if not batch.count:
            return
        if ACTION_LOGP not in batch or np.isnan(batch[ACTION_LOGP]).all():
            raise ValueError(
                "input_evaluation: expected rows with propensities, got none: log actions with "
                "action_prob= or action_logp=, or leave input_evaluation empty"
            )
        for run in batch.split_by_episode():
            self._add_run(run)
        self._asked = False
        while self._open_rows > _MOST_ROWS:
            _, runs = self._open.popitem(last=False)
            self._open_rows -= sum(run.count for run in runs)
            self._give_up()

    def _add_run(self, run: SampleBatch) -> None:
        names = (STREAM, EPISODE_ORDINAL, AGENT_ID, EPS_ID)
        key = tuple(run[name][0] for name in names if name in run)
        runs = self._open.setdefault(key, [])
        runs.append(run.copy())
        self._open_rows += run.count
        if not _ends(run):
            return
        del self._open[key]
        self._open_rows -= sum(one.count for one in runs)
        rows = concat_samples(runs)
        rows = rows.take(np.argsort(rows[T], kind="stable"))
        if np.array_equal(rows[T], np.arange(rows.count)):
            self._whole.append(rows)
        else:
            self._give_up()  # its beginning or another part is missing

    def _give_up(self) -> None:
        self.given_up += 1
        if self.given_up == 1:
            _log.warning(
                "input_evaluation: an episode was given up: not all of its rows were here when it "
                "ended, or its end never came; only whole episodes are judged, and they may be no "
                "fair selection: the metric given_up counts; read the input unshuffled, from the "
                "beginning of its episodes"
            )

    def estimates(self) -> list[OffPolicyEstimate]:
        """Estimates from the episodes completed since the last call.

        If rows came but completed no episode, `unavailable` says so; no estimates if nothing came.
        """
        whole, self._whole = self._whole, []
        asked, self._asked = self._asked, True
        if not whole:
            return [] if asked else [self._none_whole(name) for name in self.methods]
        if not self.methods:
            return []
        judged = _CompleteEpisodes.of(whole)
        return [self._estimate(name, judged) for name in self.methods]

    def _unused_counts(self) -> dict[str, Any]:
        """The numbers of episodes and rows that are not used."""
        return {"given_up": self.given_up, "open_rows": self._open_rows}

    def _none_whole(self, name: str) -> OffPolicyEstimate:
        text = (
            f"no complete episode came since the last call: {counted(self._open_rows, 'row')} of "
            f"{counted(len(self._open), 'episode')} waiting for others; given up: {self.given_up}"
        )
        return OffPolicyEstimate(name, {"unavailable": text, **self._unused_counts()})

    def _estimate(self, name: str, whole: _CompleteEpisodes) -> OffPolicyEstimate:
        method = _ALIASES.get(name, name)
        v_old = None
        try:
            episodes = self._episodes(method, whole)
            v_old = v_behavior(episodes, gamma=self._gamma).value
            if method in _NEED_MODEL:
                episodes = self._episodes(method, whole, self._fit(whole))
            estimate = ESTIMATORS[method](episodes, gamma=self._gamma)
        except ValueError as error:
            found = {"unavailable": str(error), "excluded": dict(whole.excluded)}
            return OffPolicyEstimate(name, {**found, "v_old": v_old, **self._unused_counts()})
        metrics = {**estimate.to_dict(), "v_old": v_old, **self._unused_counts()}
        metrics["v_gain"] = estimate.value / v_old if v_old else None
        return OffPolicyEstimate(name, metrics)

    def _episodes(
        self, method: str, whole: _CompleteEpisodes, fitted: CrossFitted | None = None
    ) -> Episodes:
        """The episodes that an estimator uses."""
        policy, rows = self._policy, whole.rows
        starts = np.cumsum(whole.lengths) - whole.lengths
        episodes = Episodes.from_flat(
            rows[REWARDS],
            lengths=whole.lengths,
            behaviour_logp=rows[ACTION_LOGP],
            target_logp=policy.logp(policy.flat_observations(rows), rows.leaves("actions")),
            q=None if fitted is None else fitted.q,
            v=None if fitted is None else fitted.v,
            excluded=whole.excluded,
            densities=not policy.spec.layout.is_discrete,
            pass_prob=rows[_PASS_PROB][starts] if _PASS_PROB in rows else None,
        )
        return episodes if method in _NEED_NO_PROPENSITY else episodes.with_propensity()

    def _fit(self, whole: _CompleteEpisodes) -> CrossFitted:
        """q and v, cross-fitted over episodes; for longer ones by fitted Q evaluation."""
        space = self._policy.spec.action
        if not isinstance(space, Discrete):
            raise ValueError("value models need a Discrete action space")
        folds = min(_FOLDS, len(whole.lengths))
        if folds < 2:
            raise ValueError("cross-fitting needs 2 or more episodes")
        flat = self._policy.flat_observations(whole.rows)
        return cross_fit(
            lambda: LinearRewardModel(space.n, start=space.start),
            flat,
            whole.rows["actions"],
            whole.rows[REWARDS],
            self._policy.to_numpy().probabilities(flat),
            lengths=whole.lengths,
            terminated=whole.rows[TERMINATEDS][np.cumsum(whole.lengths) - 1],
            gamma=self._gamma,
            rng=np.random.default_rng(0),
            folds=folds,
        )
