"""Sample batches: steps as columns, the data structure between readers and learners.

A `SampleBatch` maps column names to arrays of one length. Slices are views; selecting by index
copies. A space of several leaves has one column per leaf, named `obs.<path>`.

No operation changes a dtype implicitly: rewards and timestamps are float64 and int64 as on disk,
and columns of different dtypes are not joined. `with_floats` converts explicitly.

`storage.experience.multi_agent_batch` holds the batches of several policies.

Pure: uses no clock, file or thread; loads torch, pyarrow and pandas only in `to_...`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from storage.experience.compressed_columns import Compression, is_packed, pack, unpack
from storage.experience.sequences import fragment_ends, n_step, pad, sequence_lengths, unpad
from storage.experience.tables import arrow_table, pandas_frame
from storage.wording import counted

OBS = "obs"
REWARDS = "rewards"
TERMINATEDS = "terminateds"
TRUNCATEDS = "truncateds"
NEXT_OBS = "new_obs"
HAS_NEXT_OBS = "has_new_obs"
"""False if a row cannot be used for TD and GAE targets: not terminated, and no next observation."""
EPS_ID = "eps_id"
T = "t"
AGENT_ID = "agent_id"
ENV_T = "env_t"
AGENTS = "agents"
ACTION_LOGP = "action_logp"
"""Log-probability (or log-density) of the action that was taken; NaN where unknown."""
ACTION_DIST_INPUTS = "action_dist_inputs"
POLICY_ID = "policy_id"
POLICY_VERSION = "policy_version"
STREAM = "stream"
ORDINAL = "ordinal"
EPISODE_ORDINAL = "episode_ordinal"

SEQ_LENS = "seq_lens"
"""The number of steps in each row of a padded batch, whose rows are sequences."""
N_STEPS = "n_steps"
"""How many rewards a row's n-step return sums: its bootstrap is discounted by gamma to that
power."""

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
            array = self._columns[name] = _as_column(name, column)
            if self._count is None:
                self._count = len(array)
            elif len(array) != self._count:
                raise BatchError(f"column {name!r}: expected {self._count} rows, got {len(array)}")

    @classmethod
    def _trusted(cls, columns: dict[str, Array], count: int) -> SampleBatch:
        """A batch of columns that are known to be arrays with `count` rows."""
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
        """The number of rows, not of columns as in a dict; `len(list(batch))` counts columns."""
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
        return f"SampleBatch({counted(self.count, 'row')}; {shown})"

    # sizes

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._count or 0

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; strings count as references."""
        return sum(_nbytes(column) for column in self._columns.values())

    def agent_steps(self) -> int:
        """The number of steps: the rows, or the steps in all sequences of a padded batch."""
        return int(self[SEQ_LENS].sum()) if SEQ_LENS in self else self.count

    def env_steps(self) -> int:
        """The same as `agent_steps`: the batch has one agent."""
        return self.agent_steps()

    # rows

    def slice(self, start: int | None, stop: int | None, step: int | None = None) -> SampleBatch:
        """The rows `start:stop:step`, as in a Python slice; columns are views."""
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
        # for rows of a few numbers `take` is ten times as fast as indexing
        return self._trusted({k: v.take(rows, axis=0) for k, v in self._columns.items()}, len(rows))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict per row: for display, too slow for a hot path."""
        for i in range(self.count):
            yield {name: column[i] for name, column in self._columns.items()}

    def shuffle(self, rng: np.random.Generator | None = None) -> SampleBatch:
        """A new batch with the rows in random order."""
        generator = np.random.default_rng() if rng is None else rng
        return self.take(generator.permutation(self.count))

    def minibatches(
        self, size: int | None, rng: np.random.Generator | None = None
    ) -> Iterator[SampleBatch]:
        """Batches of `size` rows, the last one may be shorter; shuffled once if `rng` is given.

        `size` None or 0 means the whole batch. Raises BatchError for a negative size.
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
        """A batch with only the named columns; the arrays are shared."""
        return self._trusted({name: self[name] for name in names}, self.count)

    def leaves(self, prefix: str) -> dict[str, Array]:
        """The columns of a space, by leaf path: `{"": column}` for a space with a single leaf."""
        dotted = f"{prefix}."
        found = {k[len(dotted) :]: v for k, v in self._columns.items() if k.startswith(dotted)}
        if prefix in self._columns:
            found[""] = self._columns[prefix]
        return found

    def copy(self, *, shallow: bool = False) -> SampleBatch:
        """A copy with its own, writable arrays; with `shallow`, one that shares the arrays."""
        if shallow:
            return self._trusted(dict(self._columns), self.count)
        return self._trusted({k: v.copy() for k, v in self._columns.items()}, self.count)

    def without_rows(self) -> SampleBatch:
        """A batch with these columns, no rows and no memory of this one's."""
        return self.slice(0, 0).copy()

    def with_floats(self, dtype: npt.DTypeLike) -> SampleBatch:
        """A batch whose floating columns have this dtype; the other arrays are shared."""
        columns = {
            name: column.astype(dtype, copy=False) if column.dtype.kind == "f" else column
            for name, column in self._columns.items()
        }
        return self._trusted(columns, self.count)

    # episodes

    def split_by_episode(self) -> list[SampleBatch]:
        """One batch per episode and agent, rows by t, in the order of their first rows.

        An episode is identified by (stream, episode_ordinal) if these columns exist, else by
        eps_id: an id may be used again later. Interleaved rows are separated. Raises BatchError for
        a padded batch and for one without these columns.
        """
        self._require_steps("split_by_episode")
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

    # sequences

    def right_zero_pad(self, max_seq_len: int) -> SampleBatch:
        """A batch with one row per sequence: columns (B, max_seq_len, ...), `seq_lens` int64 (B,).

        A sequence is at most `max_seq_len` rows of one episode and agent with consecutive t, padded
        with zeros (empty strings for texts). Rows may interleave: sequences come in the order of
        `split_by_episode`. `unpad` returns the rows. Raises BatchError for a batch without t, one
        that is padded already, or one with compressed columns.
        """
        if max_seq_len < 1:
            raise BatchError(f"max_seq_len: expected 1 or more, got {max_seq_len}")
        rows = self._in_time("right_zero_pad")
        lengths = sequence_lengths(rows._fragment_ends(), max_seq_len)
        padded = {k: pad(v, lengths, max_seq_len) for k, v in rows._columns.items()}
        return self._trusted({**padded, SEQ_LENS: lengths}, len(lengths))

    def unpad(self) -> SampleBatch:
        """The rows of a padded batch, in the order of its sequences."""
        lengths = self[SEQ_LENS]
        columns = {k: unpad(v, lengths) for k, v in self._columns.items() if k != SEQ_LENS}
        return self._trusted(columns, int(lengths.sum()))

    def n_step(self, n: int, gamma: float) -> SampleBatch:
        """The batch with n-step returns as rewards, rows in the order of `split_by_episode`.

            r_t := r_t + gamma r_t+1 + ... + gamma^(m-1) r_t+m-1

        The sum has m = `n_steps` rows: n, or fewer at the end of the episode's fragment. `new_obs`,
        `has_new_obs`, `terminateds` and `truncateds` are those of the last of these rows, so that
        the target is `rewards + gamma ** n_steps * V(new_obs)` unless terminated (Sutton & Barto
        2018, eq. 7.1). `rewards` become float64. Raises BatchError for n < 1 or gamma outside [0,
        1].
        """
        if n < 1 or not 0.0 <= gamma <= 1.0:
            raise BatchError(f"n_step: expected n >= 1 and gamma in [0, 1], got {n} and {gamma}")
        rows = self._in_time("n_step")
        found = n_step(rows[REWARDS], rows._fragment_ends(), n, gamma)
        columns = {
            name: column[found.last] if name.partition(".")[0] in _AFTER else column
            for name, column in rows._columns.items()
        }
        columns |= {REWARDS: found.returns, N_STEPS: found.steps}
        return self._trusted(columns, self.count)

    def _in_time(self, what: str) -> SampleBatch:
        """The rows sorted by episode and t."""
        self._require_steps(what)
        if T not in self:
            raise BatchError(f"{what}: expected steps with a column {T!r}, got {sorted(self)}")
        packed = [name for name, column in self._columns.items() if is_packed(column)]
        if packed:
            raise BatchError(f"{what}: compressed: {packed}; decompress_if_needed comes first")
        pieces = self.split_by_episode()
        return concat_samples(pieces) if pieces else self

    def _require_steps(self, what: str) -> None:
        if SEQ_LENS in self:
            raise BatchError(
                f"{what}: expected rows that are steps, got the sequences of a padded batch; "
                "`unpad` comes first"
            )

    def _fragment_ends(self) -> Array:
        """(N,) bool, where a fragment ends: the next row does not follow, or this is terminal."""
        ends = fragment_ends(self[T], self._episode_labels()) if self.count else np.zeros(0, bool)
        for name in (TERMINATEDS, TRUNCATEDS):
            if name in self:
                ends = ends | self[name].astype(np.bool_, copy=False)
        return np.asarray(ends, np.bool_)

    # compression

    def compress(
        self,
        *,
        bulk: bool = False,
        columns: Sequence[str] | None = None,
        codec: Compression = "zstd",
    ) -> None:
        """Compress columns in place, by default those of `obs` and `new_obs`.

        With `bulk` a column is one block, else each row is a block of its own. Either way rows can
        be sliced, shuffled and joined, and `decompress_if_needed` restores the arrays. "zstd" and
        "lz4" need pyarrow, "zlib" does not. Raises BatchError for a named column that is not
        numeric.
        """
        for name in self._of(columns):
            column = self._columns[name]
            if is_packed(column) or not len(column):
                continue
            if column.dtype.kind not in "biuf":
                if columns is None:
                    continue
                raise BatchError(f"compress: column {name!r}: expected numbers, got {column.dtype}")
            self._columns[name] = pack(column, codec, bulk=bulk)

    def decompress_if_needed(self, columns: Sequence[str] | None = None) -> SampleBatch:
        """Undo `compress` in place, for all columns or the named ones; returns this batch."""
        for name in list(self) if columns is None else self._of(columns):
            column = self._columns[name]
            if is_packed(column):
                self._columns[name] = unpack(column)
        return self

    def _of(self, columns: Sequence[str] | None) -> list[str]:
        if columns is None:
            return [name for name in self if name.partition(".")[0] in (OBS, NEXT_OBS)]
        for name in columns:
            self[name]  # raises KeyError if it is missing
        return list(columns)

    # conversions

    def to_torch(self, device: Any = None, *, dtype: Any = None) -> dict[str, Any]:
        """The numeric columns as torch tensors; columns of strings are omitted.

        `dtype` (for example torch.float32) is the dtype of floating columns; None keeps theirs.
        Read-only arrays are copied. Needs the [train] extra. Raises BatchError for a compressed
        column.
        """
        import torch  # noqa: PLC0415  an optional extra

        tensors: dict[str, Any] = {}
        for name, column in self._unpacked().items():
            if column.dtype.kind in "OUST":
                continue
            own = np.require(column, requirements=["C", "W"])
            wider = _TORCH_DTYPES.get(own.dtype.name, own.dtype)
            tensor = torch.as_tensor(own.astype(wider, copy=False))
            floating = dtype is not None and tensor.is_floating_point()
            tensors[name] = tensor.to(device=device, dtype=dtype if floating else None)
        return tensors

    def to_arrow(self) -> Any:
        """The batch as a pyarrow.Table of N rows, one column each, every value kept.

        | column | Arrow type |
        |---|---|
        | (N,) of numbers or booleans | the same: float32 is `float`, int64 `int64`, ... |
        | (N, K) | `fixed_size_list<item>[K]` |
        | (N, A, B, ...) | `fixed_shape_tensor` of shape (A, B, ...), in C order |
        | texts (object) | `string`, None as null |

        NaN stays NaN and is not null. Needs pyarrow. Raises BatchError for a compressed column.
        """
        return arrow_table(self._unpacked())

    def to_pandas(self) -> Any:
        """The batch as a pandas.DataFrame of N rows, index 0..N-1.

        Columns (N,) keep their dtype; texts become objects. A column with more dimensions becomes
        objects as well: each cell is an array with the shape of a row, a view. Needs pandas. Raises
        BatchError for a compressed column.
        """
        return pandas_frame(self._unpacked())

    def _unpacked(self) -> dict[str, Array]:
        """The columns. Raises BatchError if one is compressed."""
        for name, column in self._columns.items():
            if is_packed(column):
                raise BatchError(f"column {name!r}: compressed; decompress_if_needed comes first")
        return self._columns


_TORCH_DTYPES: dict[str, Any] = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
"""dtypes in which torch cannot compute -> the next wider signed integer."""

_AFTER = (NEXT_OBS, HAS_NEXT_OBS, TERMINATEDS, TRUNCATEDS)
"""Columns, by the first part of their names, about what came after a row's last step."""


def concat_samples(batches: Sequence[SampleBatch]) -> SampleBatch:
    """Concatenate the rows of all batches; batches without rows are ignored.

    If none has rows, the result has the columns of the first one with columns.
    Raises BatchError if the columns' names, shapes or dtypes differ: float32 and float64 are not
    joined implicitly.
    """
    filled = [batch for batch in batches if batch.count]
    if len(filled) <= 1:
        return next(iter(filled or [batch for batch in batches if list(batch)]), SampleBatch())
    names = filled[0]._columns.keys()
    for batch in filled[1:]:
        if batch._columns.keys() != names:
            different = sorted(batch._columns.keys() ^ names)
            raise BatchError(f"concat_samples: not in every batch: the columns {different}")
    columns = {name: _join(name, [batch._columns[name] for batch in filled]) for name in names}
    return SampleBatch._trusted(columns, sum(batch.count for batch in filled))


def _as_column(name: str, column: npt.ArrayLike) -> Array:
    array = np.asarray(column)
    if array.ndim == 0:
        raise BatchError(f"column {name!r}: expected one value per row, got {column!r:.80}")
    return array.astype(object) if array.dtype.kind == "U" else array


def _join(name: str, columns: Sequence[Array]) -> Array:
    dtype, shape = columns[0].dtype, columns[0].shape[1:]
    if all(c.dtype == dtype and c.shape[1:] == shape and not is_packed(c) for c in columns):
        return np.concatenate(columns)  # the fast path, as thousands of pieces may be joined
    kinds = {_kind(column) for column in columns}
    shapes = {shape for _, shape in kinds}
    if len(shapes) > 1:
        raise BatchError(f"column {name!r}: expected one shape per row, got {sorted(shapes)}")
    if len(kinds) > 1:
        dtypes = sorted(dtype for dtype, _ in kinds)
        raise BatchError(f"column {name!r}: expected one dtype, got {dtypes}; see with_floats")
    return np.concatenate(columns)


def _kind(column: Array) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape of a row), also of a compressed column."""
    if is_packed(column):
        block = column[0].block
        return f"compressed {block.dtype}", block.shape[1:]
    return str(column.dtype), column.shape[1:]


def _nbytes(column: Array) -> int:
    return int(sum(row.nbytes for row in column)) if is_packed(column) else column.nbytes


def _same(a: Array, b: Array) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
