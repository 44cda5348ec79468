"""Observation filters: transformations of flat observations before the network.

Shards contain raw observations. A filter learns from them at training time, and its state is
published with the weights. Workers that filter on their own collect new statistics in a *buffer*,
which a driver merges:

    worker.push(observations)
    driver.apply_changes(worker)      # adds the worker's buffer, nothing twice
    worker.sync(driver)               # takes the driver's statistics and an empty buffer

A filter of S numbers may be called with wider observations: candidates and an action mask, which
follow the state, stay as they are.

Statistics are merged pairwise in float64 (Chan, Golub & LeVeque 1979, eq. 2.1), so that many small
pushes, one large push, and a merge of filters give the same result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
# keeps the quotient finite
_EPSILON = 1e-8
# a spread below this share of the mean is rounding of float32
_CONSTANT = 1e-7


class RunningStat:
    """Count, mean and sum of squared deviations `s` of vectors (D,)."""

    def __init__(self, size: int) -> None:
        self.n = 0
        self.mean: FloatArray = np.zeros(size)
        self.s: FloatArray = np.zeros(size)

    def push(self, rows: npt.ArrayLike) -> None:
        """Add rows (B, D); raises ValueError for another shape or numbers that are not finite."""
        values = np.asarray(rows, np.float64)
        if values.ndim != 2 or values.shape[1:] != self.mean.shape:
            raise ValueError(
                f"filter: expected rows of {self.mean.size} numbers, got shape {values.shape}"
            )
        if not np.isfinite(values).all():
            raise ValueError("filter: expected finite numbers, got NaN or infinity")
        if len(values) == 0:
            return
        mean = values.mean(axis=0)
        self._merge(len(values), mean, np.square(values - mean).sum(axis=0))

    def update(self, other: RunningStat) -> None:
        """Add everything that `other` contains."""
        if other.mean.shape != self.mean.shape:
            raise ValueError(
                f"filter: expected statistics of {self.mean.size} numbers, got {other.mean.size}"
            )
        if other.n:
            self._merge(other.n, other.mean, other.s)

    @property
    def var(self) -> FloatArray:
        """Sample variance; mean^2 for a single sample, so that it is not scaled to a huge value."""
        return self.s / (self.n - 1) if self.n > 1 else np.square(self.mean)

    @property
    def std(self) -> FloatArray:
        return np.sqrt(self.var)

    def copy(self) -> RunningStat:
        twin = RunningStat(self.mean.size)
        twin.n, twin.mean, twin.s = self.n, self.mean.copy(), self.s.copy()
        return twin

    def to_json(self) -> dict[str, Any]:
        return {"n": self.n, "mean": self.mean.tolist(), "s": self.s.tolist()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], size: int) -> RunningStat:
        """Parse the result of `to_json`.

        Raises ValueError unless the document contains a count and 2 x `size` finite numbers.
        """
        stat = cls(size)
        if not isinstance(document, Mapping) or set(document) != {"n", "mean", "s"}:
            raise ValueError(f"filter state: expected n, mean, s, got {document!r:.80}")
        if type(document["n"]) is not int or document["n"] < 0:
            raise ValueError(f"filter state: expected a count n >= 0, got {document['n']!r:.80}")
        stat.n = document["n"]
        for name in ("mean", "s"):
            numbers = np.asarray(document[name], np.float64)
            if numbers.shape != (size,) or not np.isfinite(numbers).all():
                raise ValueError(
                    f"filter state: {name}: expected {size} finite numbers, "
                    f"got shape {numbers.shape}"
                )
            setattr(stat, name, numbers)
        if (stat.s < 0).any():
            raise ValueError("filter state: s: expected sums of squares >= 0, got a negative one")
        return stat

    def _merge(self, n: int, mean: FloatArray, s: FloatArray) -> None:
        total = self.n + n
        delta = mean - self.mean
        self.mean = self.mean + delta * (n / total)
        self.s = self.s + s + np.square(delta) * (self.n * n / total)
        self.n = total


class NoFilter:
    """Returns observations (B, D) or (D,) unchanged."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return flat

    def push(self, flat: npt.ArrayLike) -> None:
        return None

    def to_json(self) -> None:
        return None

    @classmethod
    def from_json(cls, document: None, size: int) -> NoFilter:
        if document is not None:
            raise ValueError(f"filter state: expected none for NoFilter, got {document!r:.80}")
        return cls(size)


class MeanStdFilter:
    """x -> (x - mean) / (std + 1e-8), optionally clipped to [-clip, clip], in float32.

    Without any observation yet, x is unchanged. A feature that never changed is not divided: its
    first other value would become a huge number.
    """

    def __init__(self, size: int, *, clip: float | None = None) -> None:
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
            raise ValueError(f"clip: expected a number > 0, got {clip!r:.80}")
        self.size = size
        self.clip = clip
        self.stats = RunningStat(size)
        self.buffer = RunningStat(size)
        self._refresh()

    def __call__(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self.stats.n == 0:
            return flat
        features = flat[..., : self.size]
        scaled = (features - self._mean) * self._scale
        if self.clip is not None:
            np.clip(scaled, -self.clip, self.clip, out=scaled)
        if features.shape == flat.shape:
            return scaled.astype(np.float32)
        whole = flat.copy()
        whole[..., : self.size] = scaled
        return whole

    def push(self, flat: npt.ArrayLike) -> None:
        """Learn from observations (B, D). Raises ValueError for wrong shapes, infinity or NaN."""
        self.stats.push(flat)
        self.buffer.push(flat)
        self._refresh()

    def apply_changes(self, other: MeanStdFilter, *, with_buffer: bool = False) -> None:
        """Add what `other` has seen since its last sync; `with_buffer` copies its buffer, too."""
        self.stats.update(other.buffer)
        if with_buffer:
            self.buffer = other.buffer.copy()
        self._refresh()

    def sync(self, other: MeanStdFilter) -> None:
        """Become a copy of `other`, buffer included."""
        self.stats, self.buffer = other.stats.copy(), other.buffer.copy()
        self._refresh()

    def clear_buffer(self) -> None:
        self.buffer = RunningStat(self.size)

    def take_buffer(self) -> MeanStdFilter:
        """Return a copy of the filter and clear the buffer here, without losing a push."""
        taken = self.as_serialisable()
        self.clear_buffer()
        return taken

    def copy(self) -> Self:
        twin = type(self)(self.size, clip=self.clip)
        twin.sync(self)
        return twin

    def as_serialisable(self) -> MeanStdFilter:
        """A plain copy without a lock, buffer included, which can be sent between processes."""
        twin = MeanStdFilter(self.size, clip=self.clip)
        twin.sync(self)
        return twin

    def to_json(self) -> dict[str, Any]:
        """The statistics, without the buffer."""
        return {"kind": "MeanStdFilter", "clip": self.clip, "stats": self.stats.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None, size: int) -> MeanStdFilter:
        """The filter of a state (None: one without observations). Raises ValueError."""
        if document is None:
            return cls(size)
        if not isinstance(document, Mapping) or set(document) != {"kind", "clip", "stats"}:
            raise ValueError(f"filter state: expected kind, clip, stats, got {document!r:.80}")
        if document["kind"] != "MeanStdFilter":
            raise ValueError(
                f"filter state: expected the kind 'MeanStdFilter', got {document['kind']!r:.80}"
            )
        made = cls(size, clip=document["clip"])
        made.stats = RunningStat.from_json(document["stats"], size)
        made._refresh()
        return made

    def _refresh(self) -> None:
        # computed once per change, as clients apply them to every observation
        self._mean: FloatArray = self.stats.mean
        std = self.stats.std
        constant = std <= _CONSTANT * np.abs(self.stats.mean)
        self._scale: FloatArray = np.where(constant, 1.0, 1.0 / (std + _EPSILON))


class ConcurrentMeanStdFilter(MeanStdFilter):
    """A MeanStdFilter that several threads may push to, read and merge at once.

    It gives the same results, and its state is that of a MeanStdFilter: whether access is
    concurrent depends on the process, so a spec does not say it. Sampling in a background thread
    requires this filter.
    """

    def __init__(self, size: int, *, clip: float | None = None) -> None:
        self._lock = threading.RLock()
        super().__init__(size, clip=clip)

    def __call__(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        with self._lock:
            return super().__call__(flat)

    def push(self, flat: npt.ArrayLike) -> None:
        with self._lock:
            super().push(flat)

    def apply_changes(self, other: MeanStdFilter, *, with_buffer: bool = False) -> None:
        # a private copy, so that two filters that merge each other cannot deadlock
        theirs = other.copy()
        with self._lock:
            super().apply_changes(theirs, with_buffer=with_buffer)

    def sync(self, other: MeanStdFilter) -> None:
        theirs = other if type(other) is MeanStdFilter else other.as_serialisable()
        with self._lock:
            super().sync(theirs)

    def clear_buffer(self) -> None:
        with self._lock:
            super().clear_buffer()

    def take_buffer(self) -> MeanStdFilter:
        with self._lock:
            return super().take_buffer()

    def as_serialisable(self) -> MeanStdFilter:
        with self._lock:
            return super().as_serialisable()

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            return super().to_json()


FILTERS: Mapping[str, Callable[[Any, int], NoFilter | MeanStdFilter]] = {
    "NoFilter": NoFilter.from_json,
    "MeanStdFilter": MeanStdFilter.from_json,
}


def make_filter(
    name: str, size: int, state: Mapping[str, Any] | None = None
) -> NoFilter | MeanStdFilter:
    """The filter `name` for observations (D,) of `size`, with a state from `to_json`.

    Raises ValueError for an unknown name or an invalid state.
    """
    if name not in FILTERS:
        raise ValueError(f"observation filter: expected one of {sorted(FILTERS)}, got {name!r:.80}")
    return FILTERS[name](state, size)
