"""Sample batches: steps as columns, the one currency between readers and learners.

A `SampleBatch` maps column names to arrays of one length. Slices are views, gathers are copies, and
no operation changes a dtype: timestamps and rewards stay what they are on disk. A space of several
leaves has one column a leaf, named `obs.<path>`.

This is a pure room: no clock, no file, no thread; torch only inside `to_torch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

OBS = "obs"
ACTIONS = "actions"
REWARDS = "rewards"
TERMINATEDS = "terminateds"
TRUNCATEDS = "truncateds"
NEXT_OBS = "new_obs"
HAS_NEXT_OBS = "has_new_obs"
"""False where a row stays out of TD and GAE targets: not terminated, and no next observation."""
EPS_ID = "eps_id"
T = "t"
AGENT_ID = "agent_id"
ACTION_LOGP = "action_logp"
"""Log-probability (or log-density) of the action that was taken; NaN where unknown."""
ACTION_DIST_INPUTS = "action_dist_inputs"
POLICY_ID = "policy_id"
POLICY_VERSION = "policy_version"
STREAM = "stream"
ORDINAL = "ordinal"
EPISODE_ORDINAL = "episode_ordinal"

DEFAULT_POLICY_ID = "default"

Array: TypeAlias = npt.NDArray[Any]


class BatchError(ValueError):
    """Columns do not fit together; the text says which, what was expected and what came."""


class SampleBatch(MutableMapping[str, Array]):
    """Columns over N rows; behaves as a mapping from column name to array `(N, ...)`.

    `batch["obs"]` is a column; `batch[i:j]` is a batch whose columns are views of this one's.
    Raises BatchError when the columns differ in length.
    """

    __slots__ = ("_columns", "_count")

    def __init__(
        self, columns: Mapping[str, npt.ArrayLike] | None = None, **more: npt.ArrayLike
    ) -> None:
        self._columns: dict[str, Array] = {}
        self._count: int | None = None
        for name, column in {**(columns or {}), **more}.items():
            self[name] = column

    @classmethod
    def _trusted(cls, columns: dict[str, Array], count: int) -> SampleBatch:
        """A batch of columns that are known to be arrays of `count` rows."""
        batch = cls.__new__(cls)
        batch._columns, batch._count = columns, count
        return batch

    # the mapping

    @overload
    def __getitem__(self, key: str) -> Array: ...
    @overload
    def __getitem__(self, key: slice) -> SampleBatch: ...
    def __getitem__(self, key: str | slice) -> Array | SampleBatch:
        if isinstance(key, slice):
            return self.slice(key.start, key.stop, key.step)
        try:
            return self._columns[key]
        except KeyError:
            raise KeyError(f"no column {key!r}; the columns are {sorted(self)}") from None

    def __setitem__(self, key: str, column: npt.ArrayLike) -> None:
        array = _as_column(key, column)
        others = self._columns.keys() - {key}
        if others and len(array) != self.count:
            raise BatchError(f"column {key!r}: expected {self.count} rows, got {len(array)}")
        self._columns[key] = array
        self._count = len(array)

    def __delitem__(self, key: str) -> None:
        del self._columns[key]
        if not self._columns:
            self._count = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """The number of rows, as learners count; `len(list(batch))` counts columns."""
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleBatch):
            return NotImplemented
        return self._columns.keys() == other._columns.keys() and all(
            _same(column, other._columns[name]) for name, column in self._columns.items()
        )

    __hash__ = None  # type: ignore[assignment]  # a batch is mutable

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}: {v.dtype}{list(v.shape)}" for k, v in self._columns.items())
        return f"SampleBatch({self.count} rows; {shown})"

    # sizes

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._count or 0

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; strings count as references."""
        return sum(column.nbytes for column in self._columns.values())

    def agent_steps(self) -> int:
        return self.count

    def env_steps(self) -> int:
        return self.count

    # rows

    def slice(self, start: int | None, stop: int | None, step: int | None = None) -> SampleBatch:
        """The rows `start:stop:step`, read as Python reads a slice, as views."""
        rows = slice(start, stop, step)
        columns = {name: column[rows] for name, column in self._columns.items()}
        return self._trusted(columns, len(range(*rows.indices(self.count))))

    def take(self, index: npt.ArrayLike) -> SampleBatch:
        """The rows of an integer index `(M,)` or a boolean mask `(N,)`, copied, in that order."""
        rows = np.asarray(index)
        if rows.dtype == np.bool_:
            if rows.shape != (self.count,):
                raise BatchError(f"mask: expected shape ({self.count},), got {rows.shape}")
            rows = np.flatnonzero(rows)
        rows = rows.astype(np.intp, copy=False)
        return self._trusted({k: v[rows] for k, v in self._columns.items()}, len(rows))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict a row, for people's eyes: never in a hot path."""
        for i in range(self.count):
            yield {name: column[i] for name, column in self._columns.items()}

    def shuffle(self, rng: np.random.Generator | None = None) -> SampleBatch:
        """A new batch with the rows in random order."""
        generator = np.random.default_rng() if rng is None else rng
        return self.take(generator.permutation(self.count))

    def minibatches(
        self, size: int | None, rng: np.random.Generator | None = None
    ) -> Iterator[SampleBatch]:
        """Batches of `size` rows, the last one may be short; shuffled once when `rng` is given.

        `size` None or 0 is the whole batch.
        """
        if size is not None and size < 0:
            raise BatchError(f"minibatch size: expected 0 or more, got {size}")
        source = self if rng is None else self.shuffle(rng)
        step = size or self.count
        for start in range(0, self.count, step or 1):
            yield source.slice(start, min(start + step, self.count))

    def columns(self, names: Sequence[str]) -> list[Array]:
        """The named columns, in that order."""
        return [self[name] for name in names]

    def select(self, names: Sequence[str]) -> SampleBatch:
        """A batch of the named columns alone; the arrays are shared."""
        return self._trusted({name: self[name] for name in names}, self.count)

    def leaves(self, prefix: str) -> dict[str, Array]:
        """The columns of a space, by leaf path: `{"": column}` for a space that is one leaf."""
        dotted = f"{prefix}."
        found = {k[len(dotted) :]: v for k, v in self._columns.items() if k.startswith(dotted)}
        if prefix in self._columns:
            found[""] = self._columns[prefix]
        return found

    def copy(self) -> SampleBatch:
        """A batch with its own, writable arrays."""
        return self._trusted({k: v.copy() for k, v in self._columns.items()}, self.count)

    # episodes

    def split_by_episode(self) -> list[SampleBatch]:
        """One batch an episode and agent, rows by t, in the order of their first rows.

        An episode is known by (stream, episode_ordinal) where these columns exist, else by eps_id:
        an id may be used again in later years. Rows that interleave are put together.
        """
        if not self.count:
            return []
        labels = self._episode_labels()
        order = np.lexsort((self._columns[T], labels) if T in self else (labels,))
        ordered = labels[order]
        cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        runs = sorted(np.split(order, cuts), key=lambda run: int(run.min()))
        return [self._rows_of(run) for run in runs]

    def _episode_labels(self) -> npt.NDArray[np.intp]:
        """A number for each row that is equal for rows of the same episode and agent."""
        if EPISODE_ORDINAL in self:
            keys = [EPISODE_ORDINAL, *(name for name in (STREAM, AGENT_ID) if name in self)]
        elif EPS_ID in self:
            keys = [EPS_ID, *([AGENT_ID] if AGENT_ID in self else [])]
        else:
            raise BatchError(
                f"split_by_episode: expected {EPISODE_ORDINAL!r} or {EPS_ID!r}, got {sorted(self)}"
            )
        labels = np.zeros(self.count, np.intp)
        for name in keys:
            values, codes = np.unique(self._columns[name], return_inverse=True)
            labels = labels * len(values) + codes
            labels = np.unique(labels, return_inverse=True)[1]
        return labels

    def _rows_of(self, run: Array) -> SampleBatch:
        first, last = int(run[0]), int(run[-1])
        if last - first + 1 == len(run) and (np.diff(run) == 1).all():
            return self.slice(first, last + 1)
        return self.take(run)

    # the way out

    def to_torch(self, device: Any = None, *, dtype: Any = None) -> dict[str, Any]:
        """The numeric columns as torch tensors; columns of strings are left out.

        `dtype` (for example torch.float32) is what floating columns become; None keeps theirs.
        Arrays that are read-only are copied. Needs the [train] extra.
        """
        import torch  # noqa: PLC0415  an optional extra

        tensors: dict[str, Any] = {}
        for name, column in self._columns.items():
            if column.dtype.kind in "OUST":
                continue
            own = np.require(column, requirements=["C", "W"])
            wider = _TORCH_DTYPES.get(own.dtype.name, own.dtype)
            tensor = torch.as_tensor(own.astype(wider, copy=False))
            floating = dtype is not None and tensor.is_floating_point()
            tensors[name] = tensor.to(device=device, dtype=dtype if floating else None)
        return tensors


_TORCH_DTYPES: dict[str, Any] = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
"""What torch cannot compute with becomes the next wider signed integer."""


def concat_samples(batches: Sequence[SampleBatch]) -> SampleBatch:
    """The rows of all batches behind each other; empty batches do not count.

    Raises BatchError when the columns' names or shapes differ.
    """
    filled = [batch for batch in batches if batch.count]
    if len(filled) <= 1:
        return filled[0] if filled else (batches[0] if batches else SampleBatch())
    names = filled[0]._columns.keys()
    for batch in filled[1:]:
        if batch._columns.keys() != names:
            different = sorted(batch._columns.keys() ^ names)
            raise BatchError(f"concat_samples: not in every batch: the columns {different}")
    columns = {name: _join(name, [batch._columns[name] for batch in filled]) for name in names}
    return SampleBatch._trusted(columns, sum(batch.count for batch in filled))


class MultiAgentBatch:
    """Batches by policy id, and how many steps of the environment they stand for.

    `count` is environment steps; `agent_steps()` counts every agent's.
    """

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int) -> None:
        if env_steps < 0:
            raise BatchError(f"env_steps: expected 0 or more, got {env_steps}")
        self.policy_batches = dict(policy_batches)
        self.count = env_steps

    def env_steps(self) -> int:
        return self.count

    def agent_steps(self) -> int:
        return sum(batch.count for batch in self.policy_batches.values())

    def copy(self) -> MultiAgentBatch:
        copies = {name: batch.copy() for name, batch in self.policy_batches.items()}
        return MultiAgentBatch(copies, self.count)

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.count} env steps; {self.policy_batches})"

    @staticmethod
    def wrap_as_needed(
        policy_batches: Mapping[str, SampleBatch], env_steps: int
    ) -> SampleBatch | MultiAgentBatch:
        """A lone default policy's batch itself, else a MultiAgentBatch."""
        if set(policy_batches) == {DEFAULT_POLICY_ID}:
            return policy_batches[DEFAULT_POLICY_ID]
        return MultiAgentBatch(policy_batches, env_steps)

    @staticmethod
    def concat_samples(batches: Sequence[MultiAgentBatch]) -> MultiAgentBatch:
        grouped: dict[str, list[SampleBatch]] = {}
        for batch in batches:
            for name, rows in batch.policy_batches.items():
                grouped.setdefault(name, []).append(rows)
        joined = {name: concat_samples(rows) for name, rows in grouped.items()}
        return MultiAgentBatch(joined, sum(batch.count for batch in batches))


def _as_column(name: str, column: npt.ArrayLike) -> Array:
    array = np.asarray(column)
    if array.ndim == 0:
        raise BatchError(f"column {name!r}: expected one value per row, got {column!r:.80}")
    return array.astype(object) if array.dtype.kind == "U" else array


def _join(name: str, columns: Sequence[Array]) -> Array:
    shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        raise BatchError(f"column {name!r}: expected one shape per row, got {sorted(shapes)}")
    return np.concatenate(columns)


def _same(a: Array, b: Array) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
