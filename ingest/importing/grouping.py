"""Bring the rows of each episode together, wherever they are in the source.

The rows are kept in a temporary database (`ingest.importing.engine`), which sorts them out of core.
Episodes come in the order of their last rows, so that rows appended to a source follow those that
were imported before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ingest.importing.cells import texts_of
from ingest.importing.engine import KeptRows, Workspace, cut_by
from ingest.importing.readers import Problem, SourceBlock
from ingest.importing.sources import Unit

NUMBER, UNIT, EPISODE = "\x00number", "\x00unit", "\x00episode"
"""Columns that are added to a chunk: a row's number, the index of its unit, its episode."""


class Chunk(NamedTuple):
    """Whole episodes, each contiguous: a pyarrow.Table, and the rows that could not be read."""

    table: Any
    problems: Sequence[Problem]


def single_rows(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Chunk]:
    """Yield every row as an episode of one step."""
    for at, unit in enumerate(units):
        for block in unit.blocks(columns):
            yield Chunk(_marked(block, at), _named(block, unit))


def by_episode(
    units: Sequence[Unit],
    columns: Sequence[str],
    key: str,
    default: str | None,
    space: Workspace,
) -> Iterator[Chunk]:
    """Yield whole episodes; their rows keep their order. Rows without a key get the default key.

    Raises ImportFailed.
    """
    rows = KeptRows(space.connection(), [*columns, NUMBER, UNIT, EPISODE])
    for at, unit in enumerate(units):
        for block in unit.blocks(columns):
            table = _marked(block, at).append_column(EPISODE, _keys(block, key, default))
            rows.add(table)
            if block.problems:
                yield Chunk(table.slice(0, 0), _named(block, unit))
    for table in cut_by(rows.by(EPISODE, rows.columns), EPISODE):
        yield Chunk(table, [])


def _keys(block: SourceBlock, key: str, default: str | None) -> Any:
    column = block.table[key].combine_chunks()
    texts = texts_of(column)
    return texts if default is None else pc.if_else(column.is_null(), default, texts)


def _named(block: SourceBlock, unit: Unit) -> list[Problem]:
    return [one._replace(label=one.label or unit.label) for one in block.problems]


def _marked(block: SourceBlock, unit: int) -> Any:
    units = pa.repeat(pa.scalar(unit, pa.int32()), len(block.numbers))
    return block.table.append_column(NUMBER, pa.array(block.numbers)).append_column(UNIT, units)
