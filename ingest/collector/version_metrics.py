"""Returns, rewards and propensities by version and time, for the metrics and the status page.

`VersionMetrics` counts parts on the shard writer's thread, not on the event loop: after their shard
is written, and before it is recorded. After a crash in between, the parts come again, and are
counted only if their history's file did not have them. A scrape shows only versions with a role, so
that the number of series does not grow with the versions.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from storage.declarations.history_files import read_history, say_history
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns
from storage.experience.reward_history import NOTHING, Measure, Moments, RewardHistory
from storage.experience.step_columns import SOURCES

log = logging.getLogger("headrace.collector")

OPEN = 10_000
"""The maximum number of incomplete episodes whose returns are summed; the oldest are dropped."""
FULL = 100
"""Policies with a full history each; more of them have shorter ones, so that memory is bounded."""

REPLAYED = SOURCES.index("replayed")

MEASURES: Mapping[str, Measure] = {
    "episode_return": "returns",
    "step_reward": "rewards",
    "action_propensity": "propensities",
}
"""Name of the metric -> measure of the history."""


class VersionMetrics:
    """The histories of a root's policies, read at its start. One thread calls `note`.

    Without a root they are in memory only.
    """

    def __init__(self, root: Path | None = None, policies: Collection[str] = ()) -> None:
        self._lock = threading.Lock()
        self._root = root
        self._share = min(1.0, FULL / max(1, len(policies)))
        self._histories: dict[str, RewardHistory] = {}
        if root is not None:
            self._histories = {name: read_history(root, name) for name in policies}
        for one in self._histories.values():
            one.share = self._share
        self._open: OrderedDict[tuple[str, int, str], tuple[int | None, float]] = OrderedDict()

    def note(self, stream: str, parts: Sequence[Part | PartColumns]) -> None:
        """Count the steps of parts, and the returns of the episodes that end with them."""
        by_policy: dict[str, list[Part | PartColumns]] = {}
        for part in parts:
            by_policy.setdefault(part.policy_id, []).append(part)
        for policy_id, own in by_policy.items():
            history = self._histories.setdefault(policy_id, RewardHistory(share=self._share))
            if history.has_counted(stream, _last_ordinal(own)):
                continue
            with self._lock:
                self._note(stream, history, own)
            try:
                if self._root is not None:
                    say_history(self._root, policy_id, history)
            except OSError as error:  # the next shard's has it all
                log.warning("policy %s: its history cannot be written: %s", policy_id, error)

    def _note(
        self, stream: str, history: RewardHistory, parts: Sequence[Part | PartColumns]
    ) -> None:
        rewards = np.frombuffer(b"".join([part.rewards for part in parts]), np.float64)
        logp = np.frombuffer(b"".join([part.action_logp for part in parts]), np.float64)
        versions = np.frombuffer(b"".join([part.policy_version for part in parts]), np.int64)
        came = np.frombuffer(b"".join([part.received_ts for part in parts]), np.int64)
        sources = np.frombuffer(b"".join([part.source for part in parts]), np.uint8)
        history.imported += int((sources == REPLAYED).sum())
        history.add_steps(came, versions, rewards, logp)
        rows = [row for part in parts for row in _rows(part)]
        steps = np.array([row.steps for row in rows])
        starts = np.cumsum(steps) - steps
        with np.errstate(over="ignore"):
            earned = np.add.reduceat(rewards, starts).tolist()
        acted: list[int] = []
        returns: list[float] = []
        ends: list[int] = []
        for row, version, sum_, end in zip(
            rows, versions[starts].tolist(), earned, (starts + steps - 1).tolist(), strict=True
        ):
            first, total = self._go_on(stream, row, version, sum_)
            if row.ended is not None and first is not None:
                acted.append(first)
                returns.append(total)
                ends.append(end)
        history.add("returns", came[ends], np.array(acted, np.int64), np.array(returns))
        history.note_counted(stream, _last_ordinal(parts))

    def _go_on(
        self, stream: str, row: _PartEnd, version: int, earned: float
    ) -> tuple[int | None, float]:
        """(version of the episode's first step, its return so far); None if it is unknown.

        An episode counts for the version of its first step, as in a canary's arms.
        """
        if row.part == 0 and row.ended is not None:
            return version, earned
        name = stream, row.episode_ordinal, row.agent_id
        known = (version, 0.0) if row.part == 0 else self._open.pop(name, (None, 0.0))
        total = known[0], known[1] + earned
        if row.ended is None and known[0] is not None:
            self._open[name] = total
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        return total

    def of(self, policy_id: str, version: int | None) -> dict[str, Moments]:
        """Metric -> moments of a version over all time; zeros if it has not acted.

        None: there is no such version.
        """
        with self._lock:
            history = self._histories.get(policy_id)
            if history is None or version is None:
                return dict.fromkeys(MEASURES, NOTHING)
            return {name: history.total(version, one) for name, one in MEASURES.items()}

    def imported(self, policy_id: str) -> int:
        """The steps of a policy's imports."""
        found = self._histories.get(policy_id)
        return 0 if found is None else found.imported

    def history(self, policy_id: str) -> RewardHistory:
        """A copy of a policy's history."""
        with self._lock:
            found = self._histories.get(policy_id)
            return RewardHistory() if found is None else found.copied()


class _PartEnd(NamedTuple):
    """What a return needs of one part."""

    part: int
    steps: int
    ended: str | None
    episode_ordinal: int
    agent_id: str


def _rows(part: Part | PartColumns) -> Iterable[_PartEnd]:
    if isinstance(part, Part):
        return [_PartEnd(part.part, part.steps, part.ended, part.episode_ordinal, part.agent_id)]
    own = part.scalars
    columns = own.part, own.steps, own.ended, own.episode_ordinal, own.agent_id
    return map(_PartEnd._make, zip(*columns, strict=True))


def _last_ordinal(parts: Sequence[Part | PartColumns]) -> int:
    last = parts[-1]
    return last.ordinal if isinstance(last, Part) else last.scalars.ordinal[-1]
