"""From the cells of a row to the values of a step.

Every error of a row says which column, what was expected and what came: its text up to ", got"
is what such rows are counted by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np

from ingest.protocol.errors import ReplayError
from ingest.replay.categories import Categories, category
from storage.spaces.descriptors import (
    OTHER,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
)

_SUFFIX, _OTHER = ":categories", f":{OTHER}"
_LATEST = 2**62  # microseconds that the wire takes
Read: TypeAlias = Callable[[Sequence[Any]], Any]


class CellError(ValueError):
    """A cell does not hold what its column is used for."""


@dataclass(frozen=True)
class Column:
    """A column as an option names it: `NAME`, or `NAME:categories` where its values are names.

    `NAME:categories:other` declares a name for those that a later log brings.
    """

    name: str
    categorical: bool = False
    other: bool = False

    @classmethod
    def parse(cls, text: str) -> Column:
        has_other = text.endswith(_SUFFIX + _OTHER)
        listed = text.removesuffix(_OTHER) if has_other else text
        name = listed.removesuffix(_SUFFIX)
        if not name:
            raise ReplayError(f"expected the name of a column, got {text!r}")
        return cls(name, name != listed, has_other)


# --- single cells ----------------------------------------------------------------------------


def number_of(name: str, cell: Any) -> Any:
    """The int or float of a cell: a number, or its text."""
    kind = type(cell)
    if kind is float or kind is int:
        return cell
    try:
        if kind is str:
            return int(cell) if cell.lstrip("+-").isdigit() else float(cell)
        if kind is bool or kind is Decimal or isinstance(cell, (np.generic, float, int)):
            return int(cell) if cell == math.trunc(cell) else float(cell)
    except (ValueError, OverflowError, TypeError):
        pass
    raise _wrong(name, "a number", cell)


def flag_of(name: str, cell: Any) -> bool:
    """True or False: a boolean, 0 or 1, or such a text."""
    found = _FLAGS.get(str(cell).strip().lower())
    if found is None:
        raise _wrong(name, "true or false", cell)
    return found


_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def micros_of(name: str, cell: Any) -> int:
    """Microseconds since the epoch: an integer, or an ISO 8601 text (UTC where it names no zone)"""
    try:
        is_text = isinstance(cell, str) and not cell.lstrip("-").isdigit()
        micros = _moment(cell) if is_text else _whole(number_of(name, cell))
    except (ValueError, OverflowError):
        micros = _LATEST + 1
    if not -_LATEST <= micros <= _LATEST:
        raise _wrong(name, "microseconds or an ISO 8601 time", cell)
    return micros


def _moment(text: str) -> int:
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _wrong(name: str, expected: str, cell: Any) -> CellError:
    shown = "nothing" if cell is None else f"{cell!r:.80}"
    return CellError(f"column {name}: expected {expected}, got {shown}")


# --- values of a space -----------------------------------------------------------------------


def value_reader(what: str, space: Space, columns: Sequence[Column], found: Categories) -> Read:
    """What turns the cells of `columns` into a value for `space`. Raises ReplayError.

    The numbers of all columns stand behind each other, those of a list in its order. A Dict takes
    one column for each of its names, a Text one column.
    """
    names = ", ".join(column.name for column in columns)
    if isinstance(space, Dict):
        return _dict_reader(what, space, columns, found)
    if isinstance(space, Discrete) and space.names:
        if len(columns) != 1:
            raise ReplayError(f"{what}: expected one column of names, got {names}")
        return _name_reader(columns[0].name, space)
    if isinstance(space, Text):
        if len(columns) != 1 or columns[0].categorical:
            raise ReplayError(f"{what}: expected one column for a text, got {names}")
        return lambda cells: cells[0]
    if not isinstance(space, (Box, Discrete, MultiDiscrete, MultiBinary)):
        raise ReplayError(
            f"{what}: the policy's space is a {type(space).__name__}, which columns cannot fill"
        )
    size = _size_of(space)
    if len(columns) > max(size, 1):
        raise ReplayError(f"{what}: the policy expects {size} numbers, got the columns {names}")
    _require_room(what, space, columns, found)
    parts = [_part_reader(column, found) for column in columns]
    shape = _shape_of(what, space, size)

    def read(cells: Sequence[Any]) -> Any:
        numbers: list[Any] = []
        for part, cell in zip(parts, cells, strict=True):
            part(numbers, cell)
        return shape(numbers)

    return read


def _dict_reader(what: str, space: Dict, columns: Sequence[Column], found: Categories) -> Read:
    names = [column.name for column in columns]
    wanted = [name for name, _ in space.spaces]
    if sorted(names) != sorted(wanted):
        raise ReplayError(f"{what}: the policy expects the columns {wanted}, got {names}")
    places = {column.name: (place, column) for place, column in enumerate(columns)}
    readers = {
        name: (places[name][0], value_reader(f"{what}.{name}", inner, [places[name][1]], found))
        for name, inner in space.spaces
    }
    return lambda cells: {name: read([cells[place]]) for name, (place, read) in readers.items()}


def _name_reader(name: str, space: Discrete) -> Read:
    """Names as the policy declares them, whatever a file of categories says."""
    known = frozenset(space.names)

    def read(cells: Sequence[Any]) -> str:
        text = None if cells[0] is None else category(cells[0])
        if text is None or (text not in known and space.other is None):
            raise _wrong(name, "a known category", cells[0])
        return text

    return read


def _size_of(space: Box | Discrete | MultiDiscrete | MultiBinary) -> int:
    if isinstance(space, Discrete):
        return 1
    return len(space.nvec) if isinstance(space, MultiDiscrete) else math.prod(space.shape)


def _require_room(what: str, space: Any, columns: Sequence[Column], found: Categories) -> None:
    """Categories need as many codes as they are, where the place of each column is known."""
    if isinstance(space, Discrete):
        sizes: Sequence[int] = [space.n + space.start]
    elif isinstance(space, MultiDiscrete):
        sizes = [n + start for n, start in zip(space.nvec, space.start, strict=True)]
    else:
        return
    if len(sizes) != len(columns):
        return
    for column, size in zip(columns, sizes, strict=True):
        if column.categorical and len(found[column.name]) > size:
            raise ReplayError(
                f"{what}: column {column.name} has {len(found[column.name])} categories, the "
                f"policy expects at most {size}"
            )


def _part_reader(column: Column, found: Categories) -> Callable[[list[Any], Any], None]:
    name = column.name
    if column.categorical:
        codes = {category(value): code for code, value in enumerate(found[name])}

        def add_code(numbers: list[Any], cell: Any) -> None:
            code = None if cell is None else codes.get(category(cell))
            if code is None:
                raise _wrong(name, "a known category", cell)
            numbers.append(code)

        return add_code

    return lambda numbers, cell: extend(numbers, name, cell)


def extend(numbers: list[Any], name: str, cell: Any) -> None:
    """Add the numbers of a cell: one, or those of a list, a list of lists or its JSON text."""
    if type(cell) is str and cell[:1] == "[":
        cell = _listed(name, cell)
    if isinstance(cell, (list, tuple)):
        for item in cell:
            extend(numbers, name, item)
    else:
        numbers.append(number_of(name, cell))


def _listed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, "a JSON list", text) from error


def _shape_of(what: str, space: Any, size: int) -> Callable[[list[Any]], Any]:
    """What brings `size` numbers into the form of the space."""
    to_kind = float if isinstance(space, Box) and space.dtype.kind == "f" else _whole
    single = isinstance(space, Discrete) or (isinstance(space, Box) and space.shape == ())
    deep = isinstance(space, (Box, MultiBinary)) and len(space.shape) > 1

    def shape(numbers: list[Any]) -> Any:
        if len(numbers) != size:
            raise CellError(f"{what}: expected {size} numbers, got {len(numbers)}")
        try:
            made = [to_kind(item) for item in numbers]
        except OverflowError as error:
            raise CellError(f"{what}: expected smaller numbers, got {numbers!r:.80}") from error
        except ValueError as error:
            raise CellError(f"{what}: expected whole numbers, got {numbers!r:.80}") from error
        if single:
            return made[0]
        return np.array(made).reshape(space.shape) if deep else made

    return shape


def _whole(item: Any) -> int:
    whole = int(item)
    if whole != item:
        raise ValueError(item)
    return whole


# --- spaces of columns -----------------------------------------------------------------------

FEW = 256
"""A column of whole numbers within this many is one of choices, not of measurements."""


@dataclass
class Range:
    """What the cells of one column hold: how many numbers each, which, and of what kind."""

    count: int | None = None
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True

    def add(self, numbers: Sequence[Any]) -> None:
        """Take the numbers of one more cell into account."""
        self.count = len(numbers) if self.count is None else self.count
        self.whole = self.whole and all(isinstance(item, int) for item in numbers)
        finite = [item for item in numbers if math.isfinite(item)]
        self.low, self.high = min([self.low, *finite]), max([self.high, *finite])

    def sizes(self) -> tuple[list[int], list[int]] | None:
        """(sizes, starts) of the choices, None if these are measurements."""
        if not self.whole or self.count is None or not self.high - self.low < FEW:
            return None
        low = int(self.low)
        return [int(self.high) - low + 1] * self.count, [low] * self.count


def infer_space(
    columns: Sequence[Column], ranges: Mapping[str, Range], found: Categories, *, exact: bool
) -> Space:
    """The space of some columns, from what they hold. Raises ReplayError for no usable row.

    Categories make a Discrete with their names, choices alone a Discrete or a MultiDiscrete,
    measurements alone a Box, and columns of categories beside others a Dict. `exact`: whole
    numbers are always choices (an action).
    """
    for column in columns:
        if not column.categorical and not ranges[column.name].count:
            raise ReplayError(f"column {column.name}: expected numbers, got none in any row")
        if column.categorical and not found[column.name]:
            raise ReplayError(f"column {column.name}: expected categories, got none in any row")
    if any(column.categorical for column in columns):
        if len(columns) > 1:
            named = ((one.name, infer_space([one], ranges, found, exact=exact)) for one in columns)
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
