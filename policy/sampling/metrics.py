"""A worker's reports: one entry per episode, and estimates of its policy from other data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# without a consumer, only the latest episodes are stored
_MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class RolloutMetrics:
    """An episode that ended: `length` in env steps, `reward` summed over agents, unclipped.

    `perf_stats` are the worker's mean milliseconds per step so far: `env_wait_ms`, `inference_ms`.
    """

    length: int
    reward: float
    agent_rewards: Mapping[tuple[Any, str], float] = field(default_factory=dict)
    custom_metrics: Mapping[str, float] = field(default_factory=dict)
    perf_stats: Mapping[str, float] = field(default_factory=dict)
    hist_data: Mapping[str, list[float]] = field(default_factory=dict)
    media: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OffPolicyEstimate:
    """An estimate of the worker's policy, from the episodes of its input."""

    estimator_name: str
    metrics: Mapping[str, Any]


class MetricsRecorder:
    """Collects ended episodes until they are read. Two threads may share it."""

    def __init__(self) -> None:
        self._episodes: deque[RolloutMetrics] = deque(maxlen=_MOST)
        self._seconds: dict[str, float] = {}
        self._rounds = 0

    def add(self, episode: RolloutMetrics) -> None:
        self._episodes.append(episode)

    def drain(self) -> list[RolloutMetrics]:
        """Remove and return the episodes that ended since the last call, oldest first."""
        drained = []
        while self._episodes:
            drained.append(self._episodes.popleft())
        return drained

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent(what, time.perf_counter() - begin)

    def spent(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def round_done(self) -> None:
        self._rounds += 1

    def perf_stats(self) -> dict[str, float]:
        """Mean milliseconds per round, in which every copy is stepped."""
        rounds = max(self._rounds, 1)
        return {f"{what}_ms": 1000.0 * spent / rounds for what, spent in self._seconds.items()}
