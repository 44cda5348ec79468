"""Bring all rows of each episode together, wherever they are in the source.

A first pass over the column of keys finds the last row of each episode. In the second pass, an
episode is complete when that row is read. Memory holds the rows of incomplete episodes, and 8 bytes
and a key for each episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingest.importing.cells import is_bytes, texts_of
from ingest.importing.sources import SourceBlock, Unit
from ingest.protocol.errors import ImportFailed

HELD_BYTES = 1_000_000_000
"""The most bytes of incomplete episodes; a source that needs more must be sorted first."""

_MERGED = 64  # number of blocks whose keys are merged at a time
_MOST_ROWS = 2**40  # more than a unit has

NUMBER, UNIT, EPISODE = "\x00number", "\x00unit", "\x00episode"
"""Columns that are added to a chunk: a row's number, the index of its unit, its episode."""


class Problem(NamedTuple):
    """A row that could not be read: its unit, its number, the reason."""

    unit: int
    number: int
    reason: str


class Chunk(NamedTuple):
    """Whole episodes, each contiguous: a pyarrow.Table, and the rows that could not be read."""

    table: Any
    problems: Sequence[Problem]


def single_rows(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Chunk]:
    """Yield every row as an episode of one step."""
    for at, unit in enumerate(units):
        for block in unit.blocks(columns):
            problems = [Problem(at, *problem) for problem in block.problems]
            yield Chunk(_marked(block, at), problems)


def by_episode(
    units: Sequence[Unit], columns: Sequence[str], key: str, default: str | None = None
) -> Iterator[Chunk]:
    """Yield episodes in the order in which they are complete; their rows keep their order.

    Rows without a key get the default key; without a default they are yielded at once. Raises
    ImportFailed if too many rows are incomplete.
    """
    keys, lasts = _last_rows(units, key, default)
    held: Any = None
    first = 0
    for at, unit in enumerate(units):
        for block in unit.blocks(columns):
            table = _marked(block, at).append_column(EPISODE, _keys(block, key, default))
            held = table if held is None else joined([held, table])
            reached = [*block.numbers[-1:].tolist(), *(number for number, _ in block.problems)]
            after = int(lasts.searchsorted(_place(at, max(reached, default=0)), "right"))
            ready, held = _parted(held, keys.slice(first, max(0, after - first)))
            first = max(first, after)
            if held.nbytes > HELD_BYTES:
                raise ImportFailed(
                    f"the rows of {pc.count_distinct(held[EPISODE]).as_py()} episodes are so "
                    f"far apart that {held.nbytes:,} bytes are buffered: sort the source by {key}"
                )
            yield Chunk(ready, [Problem(at, *problem) for problem in block.problems])


def _last_rows(
    units: Sequence[Unit], key: str, default: str | None
) -> tuple[Any, NDArray[np.int64]]:
    """(keys, the place of each key's last row in the whole source), ordered by that place."""
    found: list[Any] = []
    for at, unit in enumerate(units):
        for block in unit.blocks([key]):
            places = _place(at, block.numbers)
            texts = _keys(block, key, default).cast(pa.large_string())
            found.append(_latest(pa.table({"key": texts, "at": places})))
            if len(found) == _MERGED:
                found = [_latest(pa.concat_tables(found))]
    if not found:
        return pa.array([], pa.large_string()), np.zeros(0, np.int64)
    whole = _latest(pa.concat_tables(found)).sort_by("at")
    whole = whole.filter(pc.is_valid(whole["key"])).combine_chunks()
    return whole["key"].combine_chunks(), whole["at"].to_numpy()


def _place(unit: int, numbers: Any) -> Any:
    """The places of rows in the whole source, by their numbers in a unit.

    They are not counted: more rows may be readable in the pass that reads only keys.
    """
    return unit * _MOST_ROWS + numbers


def _keys(block: SourceBlock, key: str, default: str | None) -> Any:
    column = block.table[key].combine_chunks()
    texts = texts_of(column)
    return texts if default is None else pc.if_else(column.is_null(), default, texts)


def _latest(table: Any) -> Any:
    return table.group_by("key").aggregate([("at", "max")]).rename_columns(["key", "at"])


def _parted(table: Any, complete: Any) -> tuple[Any, Any]:
    """(rows of complete episodes in order, then rows without a key; the other rows)."""
    ranks = pc.index_in(table[EPISODE].cast(pa.large_string()), complete)
    waits = pc.and_(pc.is_null(ranks), pc.is_valid(table[EPISODE]))
    held = table.filter(waits).combine_chunks()
    chosen = pc.invert(waits)
    ready = table.filter(chosen)
    order = np.argsort(
        ranks.filter(chosen).fill_null(-1).to_numpy(zero_copy_only=False), kind="stable"
    )
    return ready.take(pa.array(order)), held


def _marked(block: Any, unit: int) -> Any:
    units = pa.repeat(pa.scalar(unit, pa.int32()), len(block.numbers))
    return block.table.append_column(NUMBER, pa.array(block.numbers)).append_column(UNIT, units)


def joined(tables: Sequence[Any]) -> Any:
    """Concatenate tables; columns whose types differ become text."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        names = tables[0].column_names
        mixed = [name for name in names if len({str(one[name].type) for one in tables}) > 1]
        texts = [_as_texts(table, mixed) for table in tables]
        return pa.concat_tables(texts, promote_options="permissive")


def _as_texts(table: Any, names: Sequence[str]) -> Any:
    for name in names:
        if is_bytes(table[name].type):  # they make the joined column bytes, so that none is lost
            continue
        texts = texts_of(table[name].combine_chunks()).cast(pa.large_string())
        table = table.set_column(table.column_names.index(name), name, texts)
    return table
