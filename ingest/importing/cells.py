"""Read the columns of some rows as numbers, flags, times and texts, and record invalid cells.

Every fault says which column, what was expected and what was found; faults are counted by the text
before ", got". A row has at most one fault, the first one found.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from ingest.columns.arrow_kinds import (
    Array,
    Mask,
    is_bytes,
    is_list,
    is_text,
    nulls,
    one_array,
    to_numpy,
)
from ingest.columns.faults import Got, RowFaults, shown
from ingest.columns.step_numbers import COLUMNS
from ingest.importing.options import UNITS, ImportOptions
from ingest.protocol.errors import ImportFailed

_NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:nan|inf|infinity))$"
_ZONED = r"\d[T ]\d\d.*(Z|z|[+-]\d\d(:?\d\d)?)$"
_JSON_NUMBER = r"^-?(0|[1-9]\d{0,14})(\.\d{1,17})?([eE][+-]?\d{1,2})?$"
_ROUNDED = r"^-?(\d\.?\d*[eE]\+?(1[6-9]|[2-9]\d|\d{3,})|\d{16,}\.0*)$"
"""Texts of floats that are integers from 10^16 on, or nearly: their digits are not all known."""
_ESCAPED = r'["\\\x00-\x1f]'
RAW = "\x00json:"
"""The prefix of a column with the values of another as JSON, with the quotes of texts."""
_LATEST = int(COLUMNS["ts"].high)
_TRUE, _FALSE = ["true", "1", "1.0"], ["false", "0", "0.0"]


class CellFaults(RowFaults):
    """The faulty rows, and a mask of those that are dropped as incomplete, which have no faults.

    `as_other` has a mask by column: of the rows whose cell is none of a space's names and was read
    as its name for all others.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.dropped = np.zeros(rows, bool)
        self.as_other: dict[str, Array] = {}

    def add(self, bad: Mask, place: str, expected: str, got: Got | None = None) -> None:
        super().add(bad & ~self.dropped, place, expected, got)

    def take(self, others: RowFaults, rows: Array) -> None:
        super().take(others, rows)
        if isinstance(others, CellFaults):
            self.dropped[rows] |= others.dropped
            for column, mask in others.as_other.items():
                self.note_other(column, at_places(rows, mask, len(self)))

    def note_other(self, column: str, mask: Array) -> None:
        """Mark rows whose cell was read as the name for all others."""
        self.as_other[column] = self.as_other.get(column, False) | mask


class Cells:
    """Reads the cells of a table's columns as the types that they are used as."""

    def __init__(self, table: Any, options: ImportOptions, faults: CellFaults) -> None:
        self.rows: int = table.num_rows
        self._table, self._options, self.faults = table, options, faults
        self._keys = {*options.tags.values(), *filter(None, (options.episode, options.agent))}

    def raw(self, name: str) -> Any:
        """A column as a pyarrow.Array, with its default in place of missing cells."""
        column = one_array(self._table[name])
        if is_bytes(column.type):
            column = self._as_texts(name, column)
        default = self._options.default.get(name)
        if default is None or not column.null_count:
            return column
        if pa.types.is_null(column.type):
            return pa.repeat(pa.scalar(default), len(column))
        try:
            return pc.fill_null(column, pa.scalar(default).cast(column.type))
        except pa.ArrowException:
            return pc.fill_null(self._as_texts(name, column), default)

    def fault(self, name: str, bad: Mask, expected: str, column: Any = None) -> None:
        """Record faulty cells of a column; a message shows those of `column`."""
        got = None if column is None else shown(column)
        self.faults.add(bad, f"column {name}", expected, got)

    def missing(self, name: str, column: Any, expected: str, *, has_value: bool = True) -> Array:
        """Apply the option `missing` to a column; return which cells are missing, bool (rows,)."""
        absent = nulls(column)
        if not column.null_count:
            return absent
        if self._options.missing == "drop":
            self.faults.dropped |= absent
        elif self._options.missing == "error" or not has_value:
            self.fault(name, absent, f"expected {expected}", column)
        return absent

    def numbers(self, name: str, *, whole: bool = False, booleans: bool = False) -> Array:
        """A number per row: float64 (rows,), int64 if `whole`; 0 for missing or invalid cells.

        With `booleans`, true and false are 1 and 0.
        """
        column = self.raw(name)
        self.missing(name, column, "a number")
        values, bad = to_numbers(column, whole=whole, booleans=booleans)
        self.fault(name, bad, f"expected {'a whole number' if whole else 'a number'}", column)
        return values

    def flags(self, name: str) -> Array:
        """A bool per row, from booleans, 0 and 1, or texts such as "true"."""
        column = self.raw(name)
        absent = self.missing(name, column, "true or false")
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(texts_of(column)))
        true = pc.is_in(texts, pa.array(_TRUE)).to_numpy(zero_copy_only=False)
        false = pc.is_in(texts, pa.array(_FALSE)).to_numpy(zero_copy_only=False)
        self.fault(name, ~(true | false | absent), "expected true or false", column)
        return np.asarray(true)

    def micros(self, name: str) -> Array:
        """Microseconds since the epoch, int64 (rows,)."""
        column = self.raw(name)
        self.missing(name, column, "a time", has_value=False)
        values, bad = to_micros(column, self._options.time_unit, self._options.timezone)
        text = f"a time within 146,000 years of 1970 (numbers of {self._options.time_unit}"
        self.fault(name, bad, f"expected {text} or ISO 8601)", column)
        return values

    def texts(self, name: str) -> Any:
        """A pyarrow.Array of text, in which 3 and 3.0 are equal; null for missing cells."""
        return self._as_texts(name, self.raw(name))

    def _as_texts(self, name: str, column: Any) -> Any:
        """Convert a column to text; unreadable cells are faults."""
        made, is_nested = texts_of(column), pa.types.is_nested(column.type)
        more = ", and times of the years 1 to 9999" if is_nested else ", got other bytes"
        if not is_nested and name in self._keys:
            rounded = pc.fill_null(pc.match_substring_regex(made, _ROUNDED), False)
            text = "expected a text or whole number: a float of 2^53 or more may be the same for"
            self.fault(name, to_numpy(rounded), f"{text} several ids", made)
        self.fault(name, nulls(made) & ~nulls(column), f"expected UTF-8{more}")
        return made

    def quoted(self, name: str) -> Any:
        """The texts of a column as JSON strings, null for missing cells."""
        return pc.binary_join_element_wise(
            '"', _escaped(self.texts(name).cast(pa.string())), '"', ""
        )

    def json(self, name: str) -> Any:
        """A column as JSON, null for missing cells; texts that parse as numbers become numbers."""
        made = self._json(name)
        if RAW + name in self._table.column_names:
            given = one_array(self._table[RAW + name])
            if is_text(given.type):
                made = pc.if_else(_is_value(given), _rewritten(given), made)
        return made

    def _json(self, name: str) -> Any:
        column = self.raw(name)
        kind, types = column.type, pa.types
        if types.is_nested(kind):
            return self._as_texts(name, column)
        if types.is_decimal(kind):
            column, kind = column.cast(pa.float64()), pa.float64()
        texts = column.cast(pa.string())
        if types.is_floating(kind):
            return _only(texts, pc.is_finite(column))
        if types.is_integer(kind) or types.is_boolean(kind):
            return texts
        are_numbers = pc.match_substring_regex(texts, _JSON_NUMBER)
        return pc.if_else(are_numbers, texts, self.quoted(name))

    def lists(self, name: str) -> Any:
        """A column of numbers or lists unchanged; texts that are JSON lists become lists."""
        column = self.raw(name)
        if not is_text(column.type) or not _any(pc.starts_with(column, "[")):
            return column
        lines = pc.binary_join_element_wise('{"v":', pc.coalesce(column, "null"), "}\n", "")
        try:
            read = pyarrow.json.ReadOptions(block_size=max(1_000, 2 * lines.nbytes))
            found = pyarrow.json.read_json(io.BytesIO("".join(lines.to_pylist()).encode()), read)
            if is_list(found["v"].type) and len(found) == len(column):
                return one_array(found["v"])
        except pa.ArrowException:
            pass
        return pa.array([_listed(cell) for cell in column.to_pylist()], pa.list_(pa.float64()))


def _is_value(column: Any) -> Any:
    """Which cells of JSON are no texts, and no floats, which are written as their values are."""
    return pc.fill_null(pc.match_substring_regex(column, r"^(true|false|[\[{]|-?\d+$)"), False)


def _rewritten(column: Any) -> Any:
    """Cells of JSON as `json_of` writes them."""
    known: dict[str | None, str | None] = {}
    for cell in pc.unique(column).to_pylist():
        nested = cell is not None and cell.startswith(("[", "{"))
        known[cell] = json_of(json.loads(cell)) if nested else cell
    return pa.array([known[cell] for cell in column.to_pylist()], pa.string())


def _listed(cell: str | None) -> list[float] | None:
    """The numbers of a JSON text of nested lists; None for any other text."""
    try:
        return [float(item) for item in _leaves(json.loads(cell or "null"))]
    except (TypeError, OverflowError, RecursionError):
        return None
    except ValueError:  # as numpy prints arrays: without commas
        text = (cell or "").strip()
        words = text.translate({ord("["): " ", ord("]"): " "}).split()
    try:
        if not text.endswith("]"):
            return None
        return [float(word) for word in words]
    except ValueError:
        return None


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _escaped(texts: Any) -> Any:
    """Escape texts for use between the quotes of JSON strings."""
    odd = pc.fill_null(pc.match_substring_regex(texts, _ESCAPED), False)
    if not pc.any(odd).as_py():
        return texts
    made = pa.array([json.dumps(text)[1:-1] for text in texts.filter(odd).to_pylist()], pa.string())
    return pc.replace_with_mask(texts, odd, made)


def at_places(places: Array, mask: Array, rows: int | None = None) -> Array:
    """Convert a mask over the rows `places` to a mask over all rows."""
    found = np.zeros(len(mask) if rows is None else rows, bool)
    found[places[mask]] = True
    return found


def _any(mask: Any) -> bool:
    return bool(pc.any(mask).as_py())


def texts_of(column: Any) -> Any:
    """Convert any column to text, lists and structures to JSON; null for unreadable cells."""
    kind = column.type
    if pa.types.is_string(kind):
        return column
    if is_bytes(kind):
        return pa.array([_decoded(cell) for cell in column.to_pylist()], pa.string())
    if pa.types.is_nested(kind):
        cells = [None if cell is None else json_of(cell) for cell in _pylist(column)]
        return pa.array(cells, pa.string())
    if pa.types.is_floating(kind):
        numbers = to_numpy(column.drop_null()).astype(np.float64, copy=False)  # of float16 too
        with np.errstate(invalid="ignore"):
            if ((numbers == np.trunc(numbers)) & (abs(numbers) < 2**53)).all():
                column = column.cast(pa.int64())
    return column.cast(pa.string())


def json_of(value: Any) -> str:
    """A value as JSON, with null for the numbers that JSON lacks: NaN and infinity."""
    try:
        return json.dumps(value, default=_text, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=_text)


def _text(value: Any) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pylist(column: Any) -> list[Any]:
    """The cells of a nested column; None for those with a text or a time that Python lacks."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return [_as_py(cell) for cell in column]


def _as_py(cell: Any) -> Any:
    try:
        return cell.as_py()
    except (OverflowError, ValueError):
        return None


def _decoded(cell: bytes | None) -> str | None:
    try:
        return None if cell is None else cell.decode()
    except UnicodeDecodeError:
        return None


def to_numbers(column: Any, *, whole: bool = False, booleans: bool = False) -> tuple[Array, Array]:
    """(values, mask of cells that are not numbers); 0 for those and for missing cells.

    With `booleans`, true and false are 1 and 0.
    """
    absent, kind, types = nulls(column), column.type, pa.types
    if types.is_null(kind):
        return np.zeros(len(column), np.int64 if whole else np.float64), np.zeros(len(column), bool)
    if is_text(kind):
        column = _parsed(column, whole, booleans)
    elif types.is_boolean(kind) and booleans:
        column = column.cast(pa.int8())
    elif types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (types.is_integer(kind) or types.is_floating(kind)):
        return np.zeros(len(column), np.int64 if whole else np.float64), ~absent
    bad = nulls(column) & ~absent
    values = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False))
    if not whole:
        return values.astype(np.float64, copy=False), bad
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            odd = ~((values == np.trunc(values)) & (abs(values) < 2**63))
        bad, values = bad | odd, np.where(odd, 0, values)
    elif values.dtype == np.uint64:
        odd = values > np.uint64(2**63 - 1)
        bad, values = bad | odd, np.where(odd, 0, values)
    return values.astype(np.int64, copy=False), bad


def _parsed(column: Any, whole: bool, booleans: bool) -> Any:
    """Texts as numbers, with `booleans` true and false as 1 and 0, null for other texts."""
    texts = pc.utf8_trim_whitespace(column)
    kinds = (pa.int64(), pa.float64()) if whole else (pa.float64(),)
    if not _any(pc.match_substring(texts, "x", ignore_case=True)):  # Arrow would read 0x10
        for kind in kinds:
            with contextlib.suppress(pa.ArrowInvalid):
                return texts.cast(kind)
    for number, name in (("1", "true"), ("0", "false")) if booleans else ():
        texts = pc.if_else(pc.equal(pc.utf8_lower(texts), name), number, texts)
    texts = _only(texts, pc.match_substring_regex(texts, _NUMBER))
    for kind in kinds[:-1]:
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(kind)
    return texts.cast(pa.float64())


def to_micros(column: Any, unit: str, timezone: str) -> tuple[Array, Array]:
    """(microseconds since the epoch int64, mask of cells that are not times in range).

    Raises ImportFailed for an unknown zone.
    """
    absent, kind, types = nulls(column), column.type, pa.types
    if types.is_date(kind):
        column = column.cast(pa.timestamp("s" if types.is_date32(kind) else "ms"))
    if types.is_timestamp(column.type):
        return _stamped(column, timezone)
    if not is_text(kind):
        return _scaled(column, unit)
    texts = pc.utf8_trim_whitespace(column)
    digits = pc.match_substring_regex(texts, r"^[+-]?\d+(\.\d*)?$")
    if _all(digits):
        return _scaled(texts, unit)
    values, bad = _scaled(_only(texts, digits), unit)
    zoned = pc.match_substring_regex(texts, _ZONED)
    for mask, zone in ((pc.and_(pc.invert(digits), zoned), "UTC"), (_neither(digits, zoned), None)):
        found = _moments(_only(texts, mask), zone, timezone)
        chosen = np.asarray(pc.fill_null(mask, False).to_numpy(zero_copy_only=False))
        values = np.where(chosen, found.fill_null(0).to_numpy(zero_copy_only=False), values)
        bad = np.where(chosen, nulls(found), bad)
    return values, (bad | ~_in_range(values)) & ~absent


def _in_range(micros: Array) -> Array:
    """Which microseconds the protocol accepts."""
    return ~COLUMNS["ts"].unfit(micros)


def _stamped(column: Any, timezone: str) -> tuple[Array, Array]:
    """Convert timestamps to microseconds; 0 for those out of range, which a cast would wrap.

    Raises ImportFailed for an unknown zone.
    """
    most = _LATEST // UNITS[column.type.unit]
    ticks = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    bad = (ticks < -most) | (ticks > most)
    column = _only(column, pa.array(~bad)).cast(pa.timestamp("us", column.type.tz), safe=False)
    try:
        values = _in_zone(column, timezone).fill_null(0).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:  # Python knows a few zones that Arrow does not
        raise ImportFailed(f"timezone: {error!s:.300}") from error
    bad |= ~_in_range(values)  # the zone's offset may be too much
    return np.where(bad, 0, values), bad


def _all(mask: Any) -> bool:
    return pc.all(mask).as_py() is not False


def _only(texts: Any, mask: Any) -> Any:
    return pc.if_else(mask, texts, pa.scalar(None, texts.type))


def _neither(first: Any, second: Any) -> Any:
    return pc.invert(pc.or_(first, second))


def _in_zone(column: Any, timezone: str) -> Any:
    """Timestamps as int64; those without a time zone are taken as in `timezone`."""
    if column.type.tz is None:
        # when clocks change: the first of a repeated hour, the next valid moment for a skipped one
        column = pc.assume_timezone(column, timezone, ambiguous="earliest", nonexistent="latest")
    return column.cast(pa.int64())


def _scaled(column: Any, unit: str) -> tuple[Array, Array]:
    """Convert numbers in `unit` to microseconds."""
    factor = UNITS[unit]
    values, bad = to_numbers(column, whole=factor == 1)
    if factor != 1:
        values = values * factor
    bad = bad | ~_in_range(values)
    return np.where(bad, 0, np.floor(values) if factor != 1 else values).astype(np.int64), bad


def _moments(texts: Any, zone: str | None, timezone: str) -> Any:
    """ISO 8601 texts as int64 microseconds, null for other texts."""
    cut = pc.replace_substring_regex(texts, r"([.,]\d{6})\d+", r"\1")
    try:
        return _in_zone(cut.cast(pa.timestamp("us", zone)), timezone)
    except pa.ArrowInvalid:  # at least one is not a time, or has a format that Arrow does not read
        return pa.array([_moment(text, timezone) for text in texts.to_pylist()], pa.int64())


def _moment(text: str | None, timezone: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=ZoneInfo(timezone))
    try:
        since = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    except OverflowError:
        return None
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def logarithms(values: Array) -> Array:
    """Natural logarithms, NaN where undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(values > 0, np.log(values), math.nan))
