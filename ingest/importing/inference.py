"""Infer spaces from a source's columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingest.columns.arrow_kinds import flattened, nulls
from ingest.importing.categories import Categories, category, known_categories, learn_categories
from ingest.importing.cells import CellFaults, Cells, texts_of, to_numbers
from ingest.importing.engine import Workspace
from ingest.importing.formats.opening import opened_format
from ingest.importing.options import ColumnOption, ImportOptions
from ingest.importing.readers import SourceBlock
from ingest.importing.sources import (
    KeptUnit,
    Unit,
    open_source,
    require_columns,
    require_whole,
)
from ingest.protocol.errors import ImportFailed
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import DEFAULT_POLICY
from storage.spaces.action_mask import ACTION_MASK
from storage.spaces.candidates import CANDIDATES
from storage.spaces.descriptors import (
    OTHER,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
)


def infer_spaces(options: ImportOptions) -> tuple[Space, Space]:
    """(observation space, action space) that fit every usable row. Raises ImportFailed.

    Categories become names, sorted or in the order of a given file of categories. Other columns of
    the observation become float32, because a later log may have numbers that this one lacks. The
    action's integers become choices, from the smallest to the largest.
    """
    declared = infer_policy(options)
    return declared.observation, declared.action


def infer_policy(options: ImportOptions) -> PolicyDeclaration:
    """The declaration of these spaces, with the names of candidates' features. Raises ImportFailed.

    A leaf `candidates` with an `action_mask` has as many rows as the mask has elements, and so has
    the action space.
    """
    if options.has_policies:
        raise ImportFailed("expected one policy: the spaces of several are declared one by one")
    with Workspace() as space:
        options, units, _ = opened_units(options, space)
        units = several_passes(units, options, space)
        spaces = spaces_of(units, options, declared_categories(units, options))
    observation, action = spaces
    return PolicyDeclaration(
        observation=observation,
        action=action,
        policy_id=options.policy_id or DEFAULT_POLICY,
        candidate_features=tuple(options.candidate_features),
    )


def opened_units(
    options: ImportOptions, space: Workspace
) -> tuple[ImportOptions, list[Unit], Sequence[str]]:
    """(the options with a format's columns, the units of an import, what its user should know).

    The units are whole files, or the result of `sql`. Raises ImportFailed.
    """
    notes: Sequence[str] = ()
    if options.format is not None:
        options, units, notes = opened_format(options, space)
    else:
        units = open_source(options.source, options.query)
        require_whole(units)
    if options.sql is not None:
        units = [KeptUnit.selected(units, options, space.connection())]
    for unit in units:
        require_columns(unit, options.columns, others=len(units) > 1)
    return options, units, notes


def declared_categories(units: Sequence[Unit], options: ImportOptions) -> Categories:
    """The names to declare: from a given file of categories, otherwise the source's, sorted."""
    if options.categories is None:
        return learn_categories(units, options.categorical, options.categorical_finals)
    also = options.categorical_finals
    return known_categories(units, options.categorical, also, options.categories, save=False)


def several_passes(units: Sequence[Unit], options: ImportOptions, space: Workspace) -> list[Unit]:
    """Units that can be read repeatedly, with the columns that are needed. Raises ImportFailed."""
    return [
        KeptUnit.of(unit, options.columns, space.connection()) if unit.once else unit
        for unit in units
    ]


def spaces_of(
    units: Sequence[Unit], options: ImportOptions, found: Categories
) -> tuple[Space, Space]:
    """Infer (observation space, action space) from units. Raises ImportFailed."""
    every = [*options.observations, *options.actions]
    names = list(dict.fromkeys(column.name for column in every if not column.categorical))
    ranges = {name: Range() for name in names}
    for unit in units:
        for block in unit.blocks(options.columns) if names else ():
            require_single(block, options)
            cells = Cells(block.table, options, CellFaults(len(block.table)))
            for name in names:
                ranges[name].add(cells.lists(name))
    with_candidates = _with_candidates(options.observations, ranges, found)
    if with_candidates is not None:
        return with_candidates
    return (
        _space(options.observations, ranges, found, has_choices=False),
        _space(options.actions, ranges, found, has_choices=True),
    )


def _with_candidates(
    columns: Sequence[ColumnOption], ranges: Mapping[str, Range], found: Categories
) -> tuple[Space, Space] | None:
    """(observation space, action space) if columns are candidates and their mask, else None."""
    if not {CANDIDATES, ACTION_MASK} <= {column.part for column in columns}:
        return None
    spaces: dict[str, Space] = {}
    for column in columns:
        spaces[column.part] = inner = _space([column], ranges, found, has_choices=False)
        if isinstance(inner, Box) and inner.shape == (1,):
            spaces[column.part] = Box(())
    (most,), (numbers,) = (
        getattr(spaces[n], "shape", ()) or (1,) for n in (ACTION_MASK, CANDIDATES)
    )
    if numbers % most:
        text = f"expected as many numbers for each of {most} candidates, got {numbers}"
        raise ImportFailed(f"column {CANDIDATES}: {text}")
    spaces[ACTION_MASK] = MultiBinary((most,))
    spaces[CANDIDATES] = Box((most, numbers // most), ragged=True)
    return Dict(tuple(spaces.items())), Discrete(most)


@dataclass
class Range:
    """The cells of one column: how many numbers each has, their range, and their kind."""

    count: int | None = None
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True
    sample: str = ""

    def add(self, column: Any) -> None:
        """Add the numbers of more cells; other cells are ignored."""
        if not self.sample and len(there := column.drop_null()):
            self.sample = f"{texts_of(there.slice(0, 1))[0]}"
        counts, flat = flattened(column)
        values, bad = to_numbers(flat, booleans=True)
        kept = values[~(bad | nulls(flat)) & np.isfinite(values)]
        if not len(kept):
            return
        if self.count is None:
            self.count = int(np.bincount(counts[counts > 0]).argmax())
        self.whole = self.whole and bool((kept == np.trunc(kept)).all())
        self.low = min(self.low, float(kept.min()))
        self.high = max(self.high, float(kept.max()))


def _no_numbers(name: str, sample: str) -> str:
    """What to do about a column without numbers, by one of its cells."""
    expected = f"column {name}: expected numbers"
    if not sample:
        return f"{expected}, got none in any row"
    try:
        value = json.loads(sample)
    except ValueError:
        value = sample
    if isinstance(value, dict):
        keys = ", ".join(value)
        return (
            f"{expected}, got a structure with the keys {keys:.200}: name a value as {name}.KEY, "
            f"or take one in SQL, as in SELECT {name} ->> '$.KEY' AS value FROM source"
        )
    if isinstance(value, list):
        return f"{expected}, got lists without numbers, such as {sample:.80}"
    return f"{expected}, got none in any row; names need {name}:categories"


def require_single(block: SourceBlock, options: ImportOptions) -> None:
    """Raise ImportFailed if a row's reward is a list: such a file has several steps in a row."""
    for name, _ in options.reward_terms:
        there = block.table[name].drop_null()
        first = texts_of(there.slice(0, 1).combine_chunks()).to_pylist()
        if first and str(first[0]).startswith("["):
            raise ImportFailed(
                f"column {name}: expected a number in each row, got a list: each row seems to be a "
                f"batch of steps, or an episode. Make a row of each step, in SQL with unnest()"
            )


def _space(
    columns: Sequence[ColumnOption],
    ranges: Mapping[str, Range],
    found: Categories,
    *,
    has_choices: bool,
) -> Space:
    """Infer the space of some columns. Raises ImportFailed if there is no usable row.

    One column of categories becomes a Discrete with their names, categories together with other
    columns a Dict. Integers become a Discrete or a MultiDiscrete with `has_choices`, all other
    numbers a Box.
    """
    for column in columns:
        if not column.categorical and not ranges[column.name].count:
            raise ImportFailed(_no_numbers(column.name, ranges[column.name].sample))
        if column.categorical and not found[column.name]:
            raise ImportFailed(f"column {column.name}: expected categories, got none in any row")
    if any(column.categorical for column in columns):
        if len(columns) > 1:
            named = (
                (one.name, _space([one], ranges, found, has_choices=has_choices)) for one in columns
            )
            return Dict(tuple(named))
        names = map(category, found[columns[0].name])
        try:
            return Discrete.of(names, other=OTHER if columns[0].other else None)
        except SpaceError as error:  # an empty text, for example
            raise ImportFailed(f"column {columns[0].name}: {error}") from error
    each = [ranges[column.name] for column in columns]
    kinds = {column.kind for column in columns} - {""}
    whole = all(range_.whole for range_ in each)
    if "discrete" in kinds and not whole:
        listed = ", ".join(column.name for column in columns)
        raise ImportFailed(f"column {listed}: expected whole numbers (:discrete), got others")
    if not has_choices or not whole or kinds == {"box"}:
        return Box((sum(range_.count or 0 for range_ in each),))
    bounds = [
        (int(range_.low), int(range_.high)) for range_ in each for _ in range(range_.count or 0)
    ]
    sizes, starts = [high - low + 1 for low, high in bounds], [low for low, _ in bounds]
    if len(sizes) == 1:
        return Discrete(sizes[0], starts[0])
    return MultiDiscrete(tuple(sizes), tuple(starts))
