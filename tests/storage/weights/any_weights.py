"""A store that accepts any weights, for tests in which no policy acts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from storage.weights.manifest import Candidate, Served
from storage.weights.store import WeightFolder

NOON = 1_700_000_000.0
"""Seconds since the epoch."""


def any_weights(candidate: Candidate, weights: object) -> None:
    """A check that accepts everything."""


def store_in(root: Path, clock: Callable[[], float] = lambda: NOON) -> WeightFolder:
    return WeightFolder(root, "default", check=any_weights, clock=clock)


def add(store: WeightFolder, value: float, checkpoint: str | None = None) -> str:
    weights = {"w": np.array([value])}
    return store.add_candidate(weights, spec={}, metrics={}, lineage={}, checkpoint=checkpoint)


def value_of(store: WeightFolder, version: int) -> float:
    return float(store.load(version)[1]["w"][0])


def record(
    collector_id: str = "c0ffee",
    *,
    serves: int = -1,
    wanted: int = -1,
    why: str | None = None,
    until: float = NOON + 30,
    served: tuple[tuple[int, int], ...] = (),
    refused: dict[str, str] | None = None,
) -> Served:
    """The registration of a collector whose generations are its versions."""
    return Served(
        collector_id=collector_id,
        generation=serves,
        version=serves,
        wanted_generation=max(wanted, serves),
        wanted_version=max(wanted, serves),
        why=why,
        until=int(until * 1_000_000),
        served=[list(pair) for pair in served],
        refused=refused or {},
    )
