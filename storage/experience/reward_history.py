"""Rewards over time by version: sums in slots of a minute to a day, bounded in size.

    history = RewardHistory()
    history.add("rewards", micros, versions, values)      # arrays of one length
    history.totals[7].rewards.mean

The collector keeps one per policy, in a file (storage.declarations.history_files), and `headrace
report` makes one from shards. Slots are of four widths. The latest ones of each width are kept, so
that recent hours are known by the minute, and years by the day.

Pure: uses no clock, file or thread.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

LEVELS = ((60, 240), (900, 288), (14_400, 270), (86_400, 730))
"""(seconds of a slot, how many are kept): 4 hours, 3 days, 45 days, 2 years."""
FEWEST = 24
"""Slots that are kept of each width, however small the history's share is."""
Measure: TypeAlias = Literal["rewards", "returns", "propensities"]
"""`rewards` are of steps, by the version that acted; `returns` of ended episodes, by the version of
their first step; `propensities` of steps where they are known."""
BEFORE = -1
"""The version of steps without one: of the rule before the first version, or beside it."""
OTHERS = -2
"""The versions of a slot that are not kept apart."""
SLOT_VERSIONS, TOTAL_VERSIONS, STREAMS = 8, 64, 64
LARGEST = 1e100
"""Values count as at most this, so that sums of squares stay finite."""
MOST_LOGP = 700.0
"""Log-densities count as at most this."""

_FINEST = LEVELS[0][0]


class Moments(msgspec.Struct, frozen=True, array_like=True):
    """The number n of values, their sum, and the sum of their squares."""

    n: int = 0
    sum: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.n if self.n else float("nan")

    @property
    def variance(self) -> float:
        """The sample variance (denominator n - 1); nan for fewer than two values."""
        if self.n < 2:
            return float("nan")
        return max(0.0, self.squares - self.sum**2 / self.n) / (self.n - 1)

    def plus(self, other: Moments) -> Moments:
        return Moments(self.n + other.n, self.sum + other.sum, self.squares + other.squares)


NOTHING = Moments()


class Cell(msgspec.Struct, array_like=True):
    """The moments of one version, in a slot or over all time."""

    rewards: Moments = NOTHING
    returns: Moments = NOTHING
    propensities: Moments = NOTHING

    def of(self, measure: Measure) -> Moments:
        found: Moments = getattr(self, measure)
        return found

    def add(self, measure: Measure, found: Moments) -> None:
        setattr(self, measure, self.of(measure).plus(found))

    def add_all(self, other: Cell) -> None:
        self.rewards = self.rewards.plus(other.rewards)
        self.returns = self.returns.plus(other.returns)
        self.propensities = self.propensities.plus(other.propensities)


class RewardHistory(msgspec.Struct):
    """The history of one policy.

    `share` of the slots of `LEVELS` is kept. `imported` counts steps of imports; `counted` is
    stream -> the ordinal of the first part that is not counted; `begin` the earliest second of all;
    `totals` version -> moments over all time, of the latest `TOTAL_VERSIONS` versions; `levels`
    slot -> version -> moments, for each of `LEVELS`.
    """

    format: int = 1
    share: float = 1.0
    imported: int = 0
    counted: dict[str, int] = {}
    begin: int | None = None
    totals: dict[int, Cell] = {}
    levels: list[dict[int, dict[int, Cell]]] = msgspec.field(
        default_factory=lambda: [{} for _ in LEVELS]
    )

    def add(
        self,
        measure: Measure,
        micros: npt.NDArray[np.int64],
        versions: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64],
    ) -> None:
        """Count values by the time at which they arrived, and by version.

        NaN counts as 0: the sum of an episode whose rewards overflowed in both directions.
        """
        if not values.size:
            return
        values = np.clip(np.nan_to_num(values), -LARGEST, LARGEST)
        keys, place = np.unique(
            np.stack([micros // (_FINEST * 1_000_000), versions]), axis=1, return_inverse=True
        )
        place = place.reshape(-1)
        found = np.bincount(place), np.bincount(place, values), np.bincount(place, values * values)
        for (slot, version), *sums in zip(
            keys.T.tolist(), *(one.tolist() for one in found), strict=True
        ):
            self._count(slot * _FINEST, max(version, BEFORE), measure, Moments(*sums))

    def add_steps(
        self,
        micros: npt.NDArray[np.int64],
        versions: npt.NDArray[np.int64],
        rewards: npt.NDArray[np.float64],
        logp: npt.NDArray[np.float64],
    ) -> None:
        """Count the rewards of steps, and the propensities that are known."""
        self.add("rewards", micros, versions, rewards)
        known = ~np.isnan(logp)
        chances = np.exp(np.minimum(logp[known], MOST_LOGP))
        self.add("propensities", micros[known], versions[known], chances)

    def _count(self, second: int, version: int, measure: Measure, found: Moments) -> None:
        self.begin = second if self.begin is None else min(self.begin, second)
        self.totals[version] = total = self.totals.pop(version, Cell())  # the latest is the last
        total.add(measure, found)
        if len(self.totals) > TOTAL_VERSIONS:
            del self.totals[next(one for one in self.totals if one != BEFORE)]
        for (seconds, most), level in zip(LEVELS, self.levels, strict=True):
            slot = level.setdefault(second // seconds, {})
            slot.setdefault(version, Cell()).add(measure, found)
            if len(slot) > SLOT_VERSIONS + (OTHERS in slot):
                oldest = slot.pop(min(one for one in slot if one >= 0))
                slot.setdefault(OTHERS, Cell()).add_all(oldest)
            while len(level) > max(FEWEST, most * self.share):
                del level[min(level)]

    def total(self, version: int, measure: Measure) -> Moments:
        """The moments of a version over all time; zeros if it has none."""
        found = self.totals.get(version)
        return NOTHING if found is None else found.of(measure)

    def has_counted(self, stream: str, ordinal: int) -> bool:
        """Whether a part of a stream is counted already."""
        return 0 <= ordinal < self.counted.get(stream, 0)

    def note_counted(self, stream: str, last: int) -> None:
        """Note that a stream is counted up to an ordinal."""
        self.counted[stream] = max(last + 1, self.counted.pop(stream, 0))
        if len(self.counted) > STREAMS:
            del self.counted[next(iter(self.counted))]

    def is_whole(self, at: int) -> bool:
        """Whether a level still has the first slot of all."""
        return self.begin is None or self.begin // LEVELS[at][0] in self.levels[at]

    def copied(self) -> RewardHistory:
        """A copy that shares only what never changes; ten times as fast as `deepcopy`."""
        return msgspec.structs.replace(
            self,
            counted=dict(self.counted),
            totals={
                version: msgspec.structs.replace(cell) for version, cell in self.totals.items()
            },
            levels=[
                {
                    slot: {one: msgspec.structs.replace(cell) for one, cell in cells.items()}
                    for slot, cells in level
                }
                for level in map(dict.items, self.levels)
            ],
        )

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> RewardHistory:
        """Raises ValueError."""
        found = _DECODER.decode(data)
        if len(found.levels) != len(LEVELS):
            raise ValueError(f"expected {len(LEVELS)} levels, got {len(found.levels)}")
        return found


_DECODER: msgspec.json.Decoder[RewardHistory] = msgspec.json.Decoder(RewardHistory)
