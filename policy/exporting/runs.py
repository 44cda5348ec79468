"""The one reader of all formats: whole episodes, as runs of rows.

A *run* is an episode of one agent, without a gap. One that did not terminate, because it was cut
off, abandoned or is still open, ends with a time-out. So does the piece before a gap, and the next
one is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from policy.data.log_selection import LogSelection
from storage.errors import NothingYet
from storage.experience.episode import DEFAULT_AGENT
from storage.experience.sample_batch import (
    ACTION_LOGP,
    AGENT_ID,
    EPISODE_ORDINAL,
    EPS_ID,
    HAS_NEXT_OBS,
    NEXT_OBS,
    OBS,
    ORDINAL,
    POLICY_VERSION,
    REWARDS,
    STREAM,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    T,
)
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Space
from storage.spaces.leaves import Leaf, leaves

Array: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]

ACTIONS = "actions"
COLUMNS = (
    OBS, ACTIONS, REWARDS, TERMINATEDS, TRUNCATEDS, NEXT_OBS, HAS_NEXT_OBS, EPS_ID, AGENT_ID, T,
    ACTION_LOGP, POLICY_VERSION, STREAM, ORDINAL, EPISODE_ORDINAL,
)  # fmt: skip
ROWS = 16_384
"""Rows in memory at a time, beyond those of one episode."""


class ExportFailed(ValueError):
    """A log cannot be written in a format; the text says why."""


def float32(column: Array) -> Array:
    """Floats as float32; others as they are."""
    return column.astype(np.float32) if column.dtype.kind == "f" else column


def to_parquet(tables: Iterable[Any], file: Path) -> None:
    """Write tables of one schema to a file; without any there is none."""
    writer = None
    try:
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(file, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


@dataclass(frozen=True)
class WholeRun:
    """One run: T rows, its name, and whether it terminated."""

    name: str
    rows: SampleBatch
    terminated: bool

    def observations(self, leaf: Leaf) -> Array:
        """(T + 1, ...): the observations and the final one."""
        final = self.rows[leaf.column(NEXT_OBS)][-1:]
        return np.concatenate([self.rows[leaf.column(OBS)], final])

    def ends(self) -> tuple[Array, Array]:
        """(terminations, truncations), bool (T,)."""
        last = np.arange(self.rows.count) == self.rows.count - 1
        return last & self.terminated, last & (not self.terminated)


@dataclass(frozen=True)
class WholeRuns:
    """Rows of some runs, one after another; `starts` are the first rows of each."""

    rows: SampleBatch
    starts: IntArray

    @classmethod
    def of(cls, rows: SampleBatch) -> WholeRuns:
        """The runs of rows that are sorted by episode and step, with their ends set right."""
        ordinal, agent, t = rows[EPISODE_ORDINAL], rows[AGENT_ID], rows[T]
        breaks = (ordinal[1:] != ordinal[:-1]) | (agent[1:] != agent[:-1]) | (np.diff(t) != 1)
        breaks |= rows[STREAM][1:] != rows[STREAM][:-1]
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        last = np.zeros(rows.count, np.bool_)
        last[np.append(starts[1:], rows.count) - 1] = True
        over = np.asarray(rows[TERMINATEDS], np.bool_)
        known = np.asarray(rows[HAS_NEXT_OBS], np.bool_)
        # a part that was stored without its final observation: the next part begins with it
        joined = np.flatnonzero(~known & ~last)
        changed = rows.select(list(rows))
        if len(joined):
            for name in [name for name in rows if name.partition(".")[0] == NEXT_OBS]:
                following = rows[name].copy()
                following[joined] = rows[OBS + name.removeprefix(NEXT_OBS)][joined + 1]
                changed[name] = following
        changed[HAS_NEXT_OBS] = known | ~last
        changed[TRUNCATEDS] = last & ~over
        return cls(changed, starts)

    @property
    def lengths(self) -> IntArray:
        return np.diff(np.append(self.starts, self.rows.count))

    def names(self) -> Array:
        """The name of each row's run: its episode's id, with an agent or a first step if needed."""
        first = self.rows.take(self.starts)
        named = [
            f"{name}{'' if agent == DEFAULT_AGENT else f':{agent}'}{f'@{t}' if t else ''}"
            for name, agent, t in zip(
                first[EPS_ID], first[AGENT_ID], first[T].tolist(), strict=True
            )
        ]
        return np.repeat(np.array(named, object), self.lengths)

    def with_next(self) -> WholeRuns:
        """Only the rows that terminate or whose next observation is known.

        Only a run's last row can be without one; the row before then has its observation.
        """
        mask = np.asarray(self.rows[HAS_NEXT_OBS], np.bool_)
        if mask.all():
            return self
        rows = self.rows.take(mask)
        return WholeRuns.of(rows) if rows.count else WholeRuns(rows, np.zeros(0, np.int64))

    def each(self) -> Iterator[WholeRun]:
        names = self.names()
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            rows = self.rows.slice(start, start + length)
            yield WholeRun(names[start], rows, bool(rows[TERMINATEDS][-1]))


class Log:
    """What a format writes: the runs of a selection, and what is counted on the way."""

    def __init__(self, selection: LogSelection) -> None:
        self.selection = selection
        self.rows = self.runs = self.left_out = 0
        self.lineage: dict[str, list[list[int]]] = {}  # the ordinals of the rows, once all are read
        self._spaces: tuple[Space, Space] | None = None

    @property
    def spaces(self) -> tuple[Space, Space]:
        """(observation, action), known before the first rows."""
        if self._spaces is None:
            with closing(self._reader(())) as reader:
                for _ in reader:
                    break
                self._spaces = reader.spaces
        if self._spaces is None:
            where, policy = self.selection.root, self.selection.policy_id
            raise NothingYet(f"{where}: expected stored steps of policy {policy!r}, got none")
        return self._spaces

    def one_leaf(self, to: str) -> tuple[Leaf, Leaf]:
        """(observation, action) of a format whose values are one array each."""
        found = [self.numeric(space, to) for space in self.spaces]
        for kind, each in zip(("observation", "action"), found, strict=True):
            if len(each) != 1:
                raise ExportFailed(
                    f"{to}: expected an {kind} of one array, got a Dict or Tuple of {len(each)}: "
                    "rllib-episodes, minari, lerobot, huggingface and jsonl keep them"
                )
        return found[0][0], found[1][0]

    @staticmethod
    def numeric(space: Space, to: str) -> tuple[Leaf, ...]:
        """The leaves of a space without texts. Raises ExportFailed."""
        found = leaves(space)
        for leaf in found:
            if leaf.is_text:
                name = leaf.path or "a text"
                raise ExportFailed(f"{to}: expected numbers, got {name}: jsonl keeps texts")
        return found

    def blocks(
        self, *, more: Sequence[str] = (), names: bool = False, with_next: bool = False
    ) -> Iterator[WholeRuns]:
        """All runs. `more`: further columns. `with_next`: without rows that lead nowhere known."""
        with closing(self._reader(more, names=names)) as reader:
            for rows in reader:
                runs = WholeRuns.of(rows)
                kept = runs.with_next() if with_next else runs
                self.rows += kept.rows.count
                self.runs += len(kept.starts)
                self.left_out += runs.rows.count - kept.rows.count
                if kept.rows.count:
                    yield kept
            self.lineage = reader.ledger

    def _reader(self, more: Sequence[str], **how: Any) -> ShardReader:
        return self.selection.reader(
            mode="episodes", incomplete=True, batch_size=ROWS, columns=[*COLUMNS, *more], **how
        )
