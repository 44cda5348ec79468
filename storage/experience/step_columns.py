"""The numbers of a step: one table from which every layer derives its columns.

A part's buffers, the block of parts that goes to the shard writer, the Arrow schema, the columns of
a bulk import, the checks of a shard's content and the output writer follow from `STEP_COLUMNS`.
Observations and actions have columns by leaf of their spaces; infos are texts by row.

To add a column, add it to `STEP_COLUMNS` (with `added=True`) and to `StepBuffers`, a field of the
same name to the messages that state it (`ingest.protocol.messages`) and to the journal's `Acted`
and imports (at their ends), and an argument to the client's calls. Shards without the column are
read with its default.

Pure: uses no clock, file or thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

SOURCES = ("on_policy", "logged", "replayed")
"""How an action was chosen; a part stores the index into this tuple."""

UNKNOWN_VERSION = -1

LOGP_TOLERANCE = 1e-6
"""The amount by which a log-probability may exceed 0, from rounding of a softmax in float32."""

LATEST = 2**62
"""Times are at most this many microseconds before or after the epoch."""

MOST = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumn:
    """One number of each step.

    `name` is that of the column in shards, batches and bulk imports, and of the buffer in parts.
    `dtype` is the buffer's, little-endian. `default` is the value of a step for which nobody states
    one; if `nullable`, it is null in shards. Values are from `low` (not included if `open_low`) to
    `high`. `words`: the buffer has indices into them, and shards have the words.

    `in_bulk`: a bulk import may state it; otherwise the collector sets it. `sparse`: the buffer is
    empty if all values are the default. `added`: the first shards of format 1 lack the column, and
    it needs no code of its own between the wire and a part.
    """

    name: str
    dtype: str = "<f8"
    default: float
    nullable: bool = False
    low: float = -math.inf
    open_low: bool = False
    high: float = math.inf
    words: tuple[str, ...] = ()
    in_bulk: bool = True
    sparse: bool = False
    added: bool = False

    @property
    def itemsize(self) -> int:
        """The bytes of a value in a buffer."""
        return np.dtype(self.dtype).itemsize

    @property
    def typecode(self) -> str:
        """The type code of an `array.array` with the buffer's values."""
        return np.dtype(self.dtype).char

    @property
    def is_real(self) -> bool:
        """Whether the values are floats."""
        return np.dtype(self.dtype).kind == "f"

    @property
    def is_required(self) -> bool:
        """Whether a value has to be stated."""
        return math.isnan(self.default) and not self.nullable

    @property
    def expected(self) -> str:
        """The values that fit, for messages."""
        if not self.is_real:
            return f"an integer of {self.low}..{self.high}"
        if math.isinf(self.low):
            return "a finite number"
        return f"a number in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"

    def unfit(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of the values (N,) are not finite or out of range: bool (N,)."""
        above = values > self.low if self.open_low else values >= self.low
        fine = above & (values <= self.high)
        return ~(fine & np.isfinite(values)) if self.is_real else ~fine

    def fits(self, values: npt.NDArray[Any]) -> bool:
        """Whether all values (N,), N >= 1, are finite and in range."""
        if self.is_real and math.isinf(self.low):
            return all_finite(values)
        low, high = values.min(), values.max()  # NaN if there is one
        return bool((low > self.low if self.open_low else low >= self.low) and high <= self.high)

    def filled(self, steps: int) -> bytes:
        """The buffer of steps that all have the default."""
        return np.full(steps, self.default, self.dtype).tobytes()


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Whether no value is NaN or infinite. A sum shows this fast, and rarely overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all())


STEP_COLUMNS = (
    StepColumn(name="rewards", default=math.nan),
    # log-probability (or log-density) of the action that was taken
    StepColumn(name="action_logp", default=math.nan, nullable=True),
    StepColumn(name="policy_version", dtype="<i8", default=UNKNOWN_VERSION, low=-1, high=MOST),
    StepColumn(name="source", dtype="u1", default=1, low=0, high=2, words=SOURCES, in_bulk=False),
    # the probability that the step was logged
    StepColumn(name="pass_prob", default=1.0, low=0.0, open_low=True, high=1.0),
    # microseconds since the epoch: the client's, and the collector's
    StepColumn(name="ts", dtype="<i8", default=-(2**63), low=-LATEST, high=LATEST),
    StepColumn(name="received_ts", dtype="<i8", default=0, low=-LATEST, high=LATEST, in_bulk=False),
    # the environment's step, in episodes of several agents
    StepColumn(name="env_t", dtype="<i8", default=-1, nullable=True, low=0, high=MOST, sparse=True),
)
"""In the order of their columns in shards."""

ADDED_COLUMNS = tuple(column for column in STEP_COLUMNS if column.added)

NUMBER_BYTES = sum(column.itemsize for column in STEP_COLUMNS if not column.sparse)
"""The bytes of a step's numbers in a part, without the sparse ones."""


class StepBuffers(Struct, frozen=True, kw_only=True, gc=False):
    """The columns of T steps as little-endian buffers: one field per step column, and the values.

    `obs` and `actions` hold T canonical encodings (storage.spaces.codec), concatenated. If the
    space has Text, `obs_lengths` / `actions_lengths` hold the size of each in bytes (uint32 (T,));
    otherwise they are empty. `dist_inputs` are float32, rows concatenated; `dist_lengths` the bytes
    per row (uint32 (T,)), 0 = null, or empty: null everywhere.
    """

    obs: bytes
    actions: bytes
    rewards: bytes  # float64 (T,)
    action_logp: bytes  # float64 (T,), NaN = unknown
    policy_version: bytes  # int64 (T,), -1 = unknown
    source: bytes  # uint8 (T,), index into SOURCES
    pass_prob: bytes  # float64 (T,)
    ts: bytes  # int64 (T,), microseconds since the epoch, the client's
    received_ts: bytes  # int64 (T,), microseconds, the collector's
    env_t: bytes = b""  # int64 (T,), the environment's step; empty = a single-agent episode
    obs_lengths: bytes = b""
    actions_lengths: bytes = b""
    dist_inputs: bytes = b""
    dist_lengths: bytes = b""
