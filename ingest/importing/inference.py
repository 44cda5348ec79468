"""Infer spaces from a source's columns."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ingest.importing.categories import Categories, category, known_categories, learn_categories
from ingest.importing.cells import Array, CellFaults, Cells, flattened, nulls, to_numbers
from ingest.importing.options import ColumnOption, ImportOptions
from ingest.importing.sources import KeptUnit, Unit, open_source, require_columns
from ingest.protocol.errors import ImportFailed
from storage.spaces.descriptors import OTHER, Box, Dict, Discrete, MultiDiscrete, Space

FEW = 256
"""A column of integers in a range of at most this size is taken as choices, not measurements."""


def infer_spaces(options: ImportOptions) -> tuple[Space, Space]:
    """(observation space, action space) that fit every usable row. Raises ImportFailed.

    Categories become names, sorted or in the order of a given file of categories. Integers in a
    small range become choices, other numbers float32 (see `spaces_of`). The action's integers
    always become choices.
    """
    if options.has_policies:
        raise ImportFailed("expected one policy: the spaces of several are declared one by one")
    units = open_source(options.source, options.query)
    with tempfile.TemporaryDirectory(prefix="headrace-import-") as folder:
        units = several_passes(units, options, Path(folder))
        return spaces_of(units, options, declared_categories(units, options))


def declared_categories(units: Sequence[Unit], options: ImportOptions) -> Categories:
    """The names to declare: from a given file of categories, otherwise the source's, sorted."""
    if options.categories is None:
        return learn_categories(units, options.categorical, options.categorical_finals)
    also = options.categorical_finals
    return known_categories(units, options.categorical, also, options.categories)


def categories_path(options: ImportOptions) -> Path | None:
    """Where codes are stored: next to the source's file or folder, unless an option says it."""
    if options.categories is not None or not isinstance(options.source, (str, Path)):
        return options.categories
    if options.query is not None:
        return None
    path = Path(options.source)
    return path.with_name(path.name + ".categories.json")


def several_passes(units: Sequence[Unit], options: ImportOptions, folder: Path) -> list[Unit]:
    """Units that can be read repeatedly, with the columns that are needed. Raises ImportFailed."""
    for unit in units:
        require_columns(unit, options.columns)
    return [KeptUnit(unit, options.columns, folder) if unit.once else unit for unit in units]


def spaces_of(
    units: Sequence[Unit], options: ImportOptions, found: Categories
) -> tuple[Space, Space]:
    """Infer (observation space, action space) from units. Raises ImportFailed."""
    every = [*options.observations, *options.actions]
    names = list(dict.fromkeys(column.name for column in every if not column.categorical))
    ranges = {name: Range() for name in names}
    for unit in units:
        for block in unit.blocks(options.columns) if names else ():
            cells = Cells(block.table, options, CellFaults(len(block.table)))
            for name in names:
                ranges[name].add(cells.lists(name))
            for column in options.finals:
                if not column.categorical:
                    ranges[column.part].add(cells.lists(column.name))
    return (
        _space(options.observations, ranges, found, exact=False),
        _space(options.actions, ranges, found, exact=True),
    )


@dataclass
class Range:
    """The cells of one column: how many numbers each has, their range, and their kind."""

    count: int | None = None
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True

    def add(self, column: Any) -> None:
        """Add the numbers of more cells; other cells are ignored."""
        counts, flat = flattened(column)
        values, bad = to_numbers(flat)
        kept = values[~(bad | nulls(flat)) & np.isfinite(values)]
        if not len(kept):
            return
        if self.count is None:
            self.count = int(np.bincount(counts[counts > 0]).argmax())
        self.whole = self.whole and _is_whole(flat, kept)
        self.low = min(self.low, float(kept.min()))
        self.high = max(self.high, float(kept.max()))

    def sizes(self) -> tuple[list[int], list[int]] | None:
        """(sizes, starts) of the choices, None if these are measurements."""
        if not self.whole or self.count is None or not self.high - self.low < FEW:
            return None
        low = int(self.low)
        return [int(self.high) - low + 1] * self.count, [low] * self.count


def _is_whole(column: Any, values: Array) -> bool:
    """Whether all numbers are written as integers: 3.0 is a measurement."""
    kind = str(column.type)
    if kind in ("float", "double", "halffloat") or kind.startswith("decimal"):
        return False
    whole = bool((values == np.trunc(values)).all())
    if not whole or "string" not in kind:
        return whole
    return not pc.any(pc.match_substring(column, ".")).as_py()


def _space(
    columns: Sequence[ColumnOption], ranges: Mapping[str, Range], found: Categories, *, exact: bool
) -> Space:
    """Infer the space of some columns. Raises ImportFailed if there is no usable row.

    One column of categories becomes a Discrete with their names, choices alone a Discrete or a
    MultiDiscrete, measurements alone a Box, and categories together with other columns a Dict.
    `exact`: integers are always choices (for an action).
    """
    for column in columns:
        if not column.categorical and not ranges[column.name].count:
            raise ImportFailed(
                f"column {column.name}: expected numbers, got none in any row; names need "
                f"{column.name}:categories"
            )
        if column.categorical and not found[column.name]:
            raise ImportFailed(f"column {column.name}: expected categories, got none in any row")
    if any(column.categorical for column in columns):
        if len(columns) > 1:
            named = ((one.name, _space([one], ranges, found, exact=exact)) for one in columns)
            return Dict(tuple(named))
        names = map(category, found[columns[0].name])
        return Discrete.of(names, other=OTHER if columns[0].other else None)
    choices = [_choices(ranges[column.name], exact) for column in columns]
    if all(choices):
        pairs = [pair for pair in choices if pair is not None]
        sizes = [n for pair in pairs for n in pair[0]]
        starts = [n for pair in pairs for n in pair[1]]
        return (
            Discrete(sizes[0], starts[0])
            if len(sizes) == 1
            else MultiDiscrete(tuple(sizes), tuple(starts))
        )
    return Box((sum(ranges[column.name].count or 0 for column in columns),))


def _choices(range_: Range, exact: bool) -> tuple[list[int], list[int]] | None:
    if exact and range_.whole and range_.count:
        low = int(range_.low)
        return [int(range_.high) - low + 1] * range_.count, [low] * range_.count
    return range_.sizes()
