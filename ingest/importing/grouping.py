"""Bring the rows of each episode together, wherever they are in the source.

The rows are kept in a temporary database (`ingest.importing.engine`), which sorts them out of core.
Episodes come in the order of their last rows, so that rows appended to a source follow those that
were imported before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.columns.arrow_kinds import Array, is_bytes
from ingest.importing.cells import CellFaults, Cells, texts_of
from ingest.importing.engine import KeptRows, Workspace, cut_by
from ingest.importing.options import ImportOptions
from ingest.importing.readers import Problem, SourceBlock
from ingest.importing.report import Account
from ingest.importing.sources import Unit
from ingest.protocol.errors import ImportFailed
from storage.wording import counted

MOST_HELD = 5_000_000
"""The most rows of an episode that ends at a flag."""

NUMBER, UNIT, EPISODE = "\x00number", "\x00unit", "\x00episode"
"""Columns that are added to a chunk: a row's number, the index of its unit, its episode."""


class Chunk(NamedTuple):
    """Whole episodes, each contiguous: a pyarrow.Table, and the rows that could not be read."""

    table: Any
    problems: Sequence[Problem]


def all_rows(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Chunk]:
    """Yield all rows in the order of the source."""
    for at, unit in enumerate(units):
        for block in unit.blocks(columns):
            yield Chunk(_marked(block, at), _named(block, unit))


def without_repeated(
    chunks: Iterator[Chunk], keys: Sequence[str], space: Workspace, account: Account
) -> Iterator[Chunk]:
    """Yield the rows of chunks, only the first of those with the same keys; the others are counted.

    Rows that lack a key are all kept.
    """
    rows: KeptRows | None = None
    for chunk in chunks:
        rows = rows or KeptRows(space.connection())
        rows.add(chunk.table)
        if chunk.problems:
            yield Chunk(chunk.table.slice(0, 0), chunk.problems)
    if rows is None:
        return
    repeated = rows.drop_repeated(keys)
    account.report.rows_repeated += repeated
    account.report.rows += repeated
    for table in rows.select(rows.columns):
        cuts = np.flatnonzero(np.diff(table[UNIT].to_numpy())) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(table)]):
            yield Chunk(table.slice(begin, end - begin), [])


def by_flags(
    chunks: Iterator[Chunk], options: ImportOptions, labels: Sequence[str], account: Account
) -> Iterator[Chunk]:
    """Yield whole episodes, which end at the rows where a flag is true, or with their file.

    An episode's key is the number of its first row. Raises ImportFailed for a file in which no flag
    is true.
    """
    ends = " or ".join(options.ends)
    unit, seen, held = 0, False, list[Any]()

    def rest() -> Iterator[Chunk]:
        count = sum(map(len, held))
        if count and not seen:
            raise ImportFailed(
                f"{labels[unit]}: expected rows where {ends} is true, at which episodes end, got "
                f"none in {counted(count, 'row')}: name the column of an episode's key (episode), "
                "or leave out the flags if each row is an episode"
            )
        if count:
            rows = "the last row" if count == 1 else f"the last {count:,} rows"
            text = f"{rows}, after the last row where {ends} is true, made a truncated episode"
            account.note(f"{labels[unit]}: {text}")
            key = pa.repeat(pa.scalar(str(held[0][NUMBER][0])), count)
            yield Chunk(joined(held).append_column(EPISODE, key), [])
        held.clear()

    for table, problems in chunks:
        if problems:
            yield Chunk(table.slice(0, 0), problems)
        if not len(table):
            continue
        if table[UNIT][0].as_py() != unit:
            yield from rest()
            unit, seen = table[UNIT][0].as_py(), False
        true = _true(table, options)
        places = np.flatnonzero(true)
        if not len(places):
            held.append(table)
            if sum(map(len, held)) > MOST_HELD:
                raise ImportFailed(
                    f"{labels[unit]}: expected an episode of at most {MOST_HELD:,} rows, got more "
                    f"without a row where {ends} is true"
                )
            continue
        numbers, end = table[NUMBER].to_numpy(), int(places[-1]) + 1
        before = sum(map(len, held))
        begins = held[0][NUMBER][0].as_py() if held else numbers[0]
        firsts = np.append(begins, numbers[places[:-1] + 1])
        lengths = np.diff(np.append(-before, places + 1))
        keys = pa.array(np.repeat(firsts, lengths)).cast(pa.string())
        whole = joined([*held, table.slice(0, end)]).append_column(EPISODE, keys)
        yield Chunk(whole, [])
        seen, held[:] = True, [table.slice(end)] if end < len(table) else []
    yield from rest()


def _true(table: Any, options: ImportOptions) -> Array:
    """The rows where a flag is true."""
    cells = Cells(table, options, CellFaults(len(table)))
    return np.asarray(np.logical_or.reduce([cells.flags(name) for name in options.ends]))


def within(chunks: Iterator[Chunk], options: ImportOptions) -> Iterator[Chunk]:
    """Yield the episodes whose earliest time is in the options' period.

    Rows that are dropped for want of a time do not count, but an episode of nothing else is in
    every period, so that they are reported. An invalid time may be any.
    """
    limits = np.iinfo(np.int64)
    since = limits.min if options.since is None else options.since
    until = limits.max if options.until is None else options.until
    for table, problems in chunks:
        if len(table):
            cells = Cells(table, options, CellFaults(len(table)))
            times, faults = cells.micros(str(options.time)), cells.faults
            micros = np.where(faults.dropped, limits.max, np.where(faults.bad, since, times))
            begins = np.arange(len(table))
            if EPISODE in table.column_names:
                keys = table[EPISODE].to_numpy()
                begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
            earliest = np.minimum.reduceat(micros, begins)
            kept = (since <= earliest) & (earliest < until) | (earliest == limits.max)
            lengths = np.diff(np.append(begins, len(table)))
            table = table.filter(pa.array(np.repeat(kept, lengths)))
        yield Chunk(table, problems)


def joined(tables: Sequence[Any]) -> Any:
    """Concatenate tables; columns whose types differ become text."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        names = tables[0].column_names
        mixed = {name for name in names if len({str(one[name].type) for one in tables}) > 1}
        texts = [
            pa.table({name: _text(one[name]) if name in mixed else one[name] for name in names})
            for one in tables
        ]
        return pa.concat_tables(texts, promote_options="permissive")


def _text(column: Any) -> Any:
    """A column as text; bytes stay, and make the joined column bytes, so that none is lost."""
    return column if is_bytes(column.type) else texts_of(column.combine_chunks())


def by_episode(
    chunks: Iterator[Chunk], key: str, default: str | None, space: Workspace
) -> Iterator[Chunk]:
    """Yield whole episodes; their rows keep their order. Rows without a key get the default key.

    Raises ImportFailed.
    """
    rows: KeptRows | None = None
    for table, problems in chunks:
        keyed = table.append_column(EPISODE, _keys(table, key, default))
        rows = rows or KeptRows(space.connection())
        rows.add(keyed)
        if problems:
            yield Chunk(keyed.slice(0, 0), problems)
    if rows is not None:
        for table in cut_by(rows.by(EPISODE, rows.columns), EPISODE):
            yield Chunk(table, [])


def _keys(table: Any, key: str, default: str | None) -> Any:
    column = table[key].combine_chunks()
    texts = texts_of(column)
    return texts if default is None else pc.if_else(column.is_null(), default, texts)


def _named(block: SourceBlock, unit: Unit) -> list[Problem]:
    return [one._replace(label=one.label or unit.label) for one in block.problems]


def _marked(block: SourceBlock, unit: int) -> Any:
    units = pa.repeat(pa.scalar(unit, pa.int32()), len(block.numbers))
    return block.table.append_column(NUMBER, pa.array(block.numbers)).append_column(UNIT, units)
