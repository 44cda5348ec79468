"""Cells: numbers, times and flags are read as Python does; invalid ones are faults."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.columns.arrow_kinds import flattened
from ingest.importing.cells import CellFaults, Cells, texts_of, to_micros, to_numbers
from ingest.importing.options import ImportOptions
from ingest.protocol.errors import ImportFailed

MICRO = timedelta(microseconds=1)
START = datetime(1970, 1, 1, tzinfo=UTC)


WHOLE = st.none() | st.integers(-(2**62), 2**62) | st.sampled_from(["x", "", "1_0", "0x1", "0X1"])


@given(st.lists(WHOLE))
def test_whole_numbers_of_texts_are_exact(cells: list[Any]) -> None:
    """A text that is not a number is marked, and no other cell loses a digit."""
    texts = pa.array([None if cell is None else f" {cell} " for cell in cells], pa.string())
    values, bad = to_numbers(texts, whole=True)
    assert bad.tolist() == [isinstance(cell, str) for cell in cells]
    for cell, value in zip(cells, values.tolist(), strict=True):
        assert not isinstance(cell, int) or value == cell


@given(st.lists(st.none() | st.floats() | st.just("nothing")))
def test_numbers_of_texts_are_those_of_python(cells: list[Any]) -> None:
    """NaN and infinity are numbers, which a space refuses."""
    texts = pa.array([None if cell is None else str(cell) for cell in cells], pa.string())
    values, bad = to_numbers(texts)
    for cell, value, wrong in zip(cells, values.tolist(), bad.tolist(), strict=True):
        assert wrong == isinstance(cell, str)
        if isinstance(cell, float):
            assert value == cell or math.isnan(value) == math.isnan(cell) is True


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, 2.5, None], pa.float32()), [1, 2.5, 0]),
        (pa.array([True, None]), [1, 0]),
        (pa.array(["True", "false", " TRUE ", "False", "2.5", None]), [1, 0, 1, 0, 2.5, 0]),
        (pa.array(["true"], pa.large_string()), [1]),
        (pa.array([2**64 - 1, 1], pa.uint64()), [float(2**64), 1]),
        (pa.array([None, None]), [0, 0]),
    ],
)
def test_numbers_of_other_kinds(column: Any, expected: list[float]) -> None:
    values, bad = to_numbers(column, booleans=True)
    assert values.tolist() == expected
    assert not bad.any()


@pytest.mark.parametrize("column", [pa.array([True, False]), pa.array(["True", "false"])])
def test_a_boolean_is_a_number_only_where_that_is_meant(column: Any) -> None:
    """A propensity of True would be 1: a mistaken column is a fault instead."""
    assert to_numbers(column)[1].all()
    assert to_numbers(column, whole=True)[1].all()


def test_what_is_not_whole_is_no_integer() -> None:
    """3.0 is an integer; 3.5 and values beyond int64 are not; a date is not a number."""
    values, bad = to_numbers(pa.array([3.0, 3.5, 1e30, None]), whole=True)
    assert (values.tolist(), bad.tolist()) == ([3, 0, 0, 0], [False, True, True, False])
    values, bad = to_numbers(pa.array(["True", "0", "truth", "t"]), whole=True, booleans=True)
    assert (values.tolist(), bad.tolist()) == ([1, 0, 0, 0], [False, False, True, True])
    _, bad = to_numbers(pa.array([2**63, 1], pa.uint64()), whole=True)
    assert bad.tolist() == [True, False]
    _, bad = to_numbers(pa.array([datetime(2026, 1, 1), None]))  # noqa: DTZ001 - none is the case
    assert bad.tolist() == [True, False]


TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1))  # noqa: DTZ001 - zones come by hand


ZONES = st.sampled_from(["", "Z", "+02:00"])


@given(st.lists(TIMES, min_size=1), st.sampled_from(["T", " "]), ZONES)
def test_times_are_those_of_python(times: list[datetime], sep: str, zone: str) -> None:
    """ISO 8601 with either separator, with and without a zone and a fraction."""
    texts = [time.isoformat(sep) + zone for time in times]
    values, bad = to_micros(pa.array(texts), "us", "UTC")
    shift = timedelta(hours=2 if zone == "+02:00" else 0)
    assert not bad.any()
    assert values.tolist() == [(t.replace(tzinfo=UTC) - shift - START) // MICRO for t in times]


def test_times_without_a_zone_are_the_given_ones() -> None:
    """An hour that occurs twice means the first; numbers, dates and stamped times need no zone."""
    zone = "Europe/Berlin"
    texts = ["2026-07-01T12:00", "2026-10-25 02:30:00", "2026-07-01T12:00Z", "2026-07-01"]
    expected = [
        datetime(2026, 7, 1, 12, tzinfo=ZoneInfo(zone)),
        datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo(zone)),
        datetime(2026, 7, 1, 12, tzinfo=UTC),
        datetime(2026, 7, 1, tzinfo=ZoneInfo(zone)),
    ]
    micros = [(time.astimezone(UTC) - START) // MICRO for time in expected]
    assert to_micros(pa.array(texts), "us", zone)[0].tolist() == micros
    naive = pa.array([datetime(2026, 7, 1, 12)], pa.timestamp("ms"))  # noqa: DTZ001 - the case
    assert to_micros(naive, "us", zone)[0].tolist() == micros[:1]
    stamped = pa.array([expected[2]], pa.timestamp("ns", "UTC"))
    assert to_micros(stamped, "us", zone)[0].tolist() == micros[2:3]


@pytest.mark.parametrize(
    ("column", "unit", "micros", "bad"),
    [
        (["1", "2.5", "x", "-3"], "ms", [1_000, 2_500, 0, -3_000], [False, False, True, False]),
        (["2026-13-01", "1", None], "us", [0, 1, 0], [True, False, False]),
        ([10**18 * 9, 1], "s", [0, 1_000_000], [True, False]),
        ([1_700_000_000_123_456_789], "ns", [1_700_000_000_123_456], [False]),
        (["2026-01-01T00:00:00.1234567Z"], "us", [1_767_225_600_123_456], [False]),
    ],
)
def test_units_and_what_is_no_time(
    column: list[Any], unit: str, micros: list[int], bad: list[bool]
) -> None:
    """Numbers are in the given unit; a cell that is neither a number nor a time is marked."""
    values, wrong = to_micros(pa.array(column), unit, "UTC")
    assert wrong.tolist() == bad
    assert np.where(wrong, 0, values).tolist() == micros


FAR = 2**62
"""The latest microsecond that a collector accepts."""


@pytest.mark.parametrize("tz", [None, "UTC"])
@pytest.mark.parametrize(
    ("unit", "fine", "far"),
    [
        ("s", [FAR // 10**6, -(FAR // 10**6)], [FAR // 10**6 + 1, 10**14, 2**63 - 1, -(2**63)]),
        # these two would wrap to the present
        ("s", [], [1_700_000_000 + 2**64 // 10**6, 1_700_000_000 - 2**64 // 10**6]),
        ("ms", [FAR // 1000], [FAR // 1000 + 1, 2**63 - 1, -(2**63)]),
        ("us", [FAR, -FAR], [FAR + 1, -FAR - 1, 2**63 - 1, -(2**63)]),
        ("ns", [2**63 - 1, -(10**18)], []),
    ],
)
def test_a_timestamp_out_of_range_is_marked(
    unit: str, fine: list[int], far: list[int], tz: str | None
) -> None:
    """It never becomes another time, whatever its unit; its neighbours are read."""
    stamps = pa.array([*fine, *far, None, 0], pa.timestamp(unit, tz))
    values, bad = to_micros(stamps, "us", "UTC")
    assert bad.tolist() == [False] * len(fine) + [True] * len(far) + [False] * 2
    per = {"s": 10**6, "ms": 10**3, "us": 1}
    expected = [ticks * per[unit] if unit in per else ticks // 1000 for ticks in fine]
    assert values[~bad].tolist() == [*expected, 0, 0]


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (pa.array([FAR + 1, None], pa.timestamp("us")), "timestamp[us] 4611686018427387905"),
        (pa.array([2**31 - 1, None], pa.date32()), "date32[day] 2147483647"),
        (pa.array([FAR], pa.int64()).view(pa.date64()), "date64[ms] 4611686018427387904"),
        (pa.array([-(2**63)]), "-9223372036854775808"),
        (pa.array([2.0**63]), "9.223372036854776e+18"),
    ],
)
def test_a_time_out_of_range_is_shown(column: Any, shown: str) -> None:
    """Dates and numbers have the same limits, and Python need not have such a time."""
    found = cells(column, missing="drop")
    found.micros("x")
    reason = "column x: expected a time within 146,000 years of 1970 (numbers of us or ISO 8601)"
    assert [fault.text(0) for fault, _ in found.faults.each()] == [f"{reason}, got {shown}"]


@pytest.mark.parametrize(("ticks", "zone"), [(FAR, "America/New_York"), (-FAR, "Asia/Kolkata")])
def test_a_zones_offset_may_lead_out_of_range(ticks: int, zone: str) -> None:
    """A naive time is checked after its zone is applied, too."""
    values, bad = to_micros(pa.array([ticks, 0], pa.timestamp("us")), "us", zone)
    assert bad.tolist() == [True, False]
    assert abs(int(values[1])) < 86_400 * 10**6


def test_a_zone_that_only_python_knows_is_named() -> None:
    """The rows are not at fault."""
    with pytest.raises(ImportFailed, match=r"timezone: .*Factory"):
        to_micros(pa.array([0], pa.timestamp("us")), "us", "Factory")


def cells(column: Any, **options: Any) -> Cells:
    meaning = {"observation": ["x"], "action": "x", "reward": "x", **options}
    table = pa.table({"x": column})
    return Cells(table, ImportOptions(source=table, **meaning), CellFaults(len(column)))


def test_flags_are_booleans_zero_and_one_and_such_texts() -> None:
    """Any other cell is a fault, and the error shows it."""
    found = cells(["true", " FALSE ", "1", "0.0", "yes", None])
    assert found.flags("x").tolist() == [True, False, True, False, False, False]
    assert found.faults.bad.tolist() == [False] * 4 + [True, True]
    assert {fault.text(int(row)) for fault, rows in found.faults.each() for row in rows} == {
        "column x: expected true or false, got 'yes'",
        "column x: expected true or false, got nothing",
    }


@pytest.mark.parametrize(
    ("options", "values", "bad", "dropped"),
    [
        ({}, [1, 0], [False, True], [False, False]),
        ({"missing": "drop"}, [1, 0], [False, False], [False, True]),
        ({"missing": "value"}, [1, 0], [False, False], [False, False]),
        ({"default": {"x": "7"}}, [1, 7], [False, False], [False, False]),
        ({"missing": "drop", "default": {"x": "7"}}, [1, 7], [False, False], [False, False]),
    ],
)
def test_a_missing_cell_is_what_the_options_say(
    options: dict[str, Any], values: list[float], bad: list[bool], dropped: list[bool]
) -> None:
    """A missing cell is a fault, a dropped row or 0; the column's default takes precedence."""
    found = cells([1.0, None], **options)
    assert found.numbers("x").tolist() == values
    assert (found.faults.bad.tolist(), found.faults.dropped.tolist()) == (bad, dropped)


def test_texts_are_the_same_for_the_same_number() -> None:
    """3 and 3.0 are one category; 3.5 is another, whatever else the column holds."""
    assert texts_of(pa.array([3.0, None])).to_pylist() == ["3", None]
    assert texts_of(pa.array([3])).to_pylist() == ["3"]
    assert texts_of(pa.array([3.5, 2.0])).to_pylist() == ["3.5", "2"]
    assert texts_of(pa.array([True])).to_pylist() == ["true"]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ([1.0, NAN, -INF], "[1.0, null, null]"),
        (
            {"a": NAN, "b": [{"c": [INF]}], "d": "NaN"},
            '{"a": null, "b": [{"c": [null]}], "d": "NaN"}',
        ),
        ([b"text", b"\xff"], '["text", "\\\\xff"]'),
        ([datetime(2026, 1, 1, tzinfo=UTC)], '["2026-01-01 00:00:00+00:00"]'),
    ],
)
def test_lists_and_structures_are_json(cell: Any, expected: str) -> None:
    """A collector refuses the NaN that Python writes; the other values of the cell stay."""
    found = cells([cell, None])
    assert found.json("x").to_pylist() == [expected, None]
    assert not found.faults.bad.any()


def test_an_unreadable_cell_is_a_fault_of_its_row() -> None:
    """Python has no time after the year 9999; Arrow has, and texts that are not UTF-8."""
    odd = pa.array([b"ok", b"\xff", b"ok"])
    texts = pa.StringArray.from_buffers(3, *odd.buffers()[1:])
    lists = pa.ListArray.from_arrays([0, 1, 2, 3], texts)
    times = pa.array([[0], [10**14], [0]], pa.list_(pa.timestamp("s")))
    for column, shown in ((lists, '["ok"]'), (times, '["1970-01-01 00:00:00"]'), (odd, '"ok"')):
        found = cells(column)
        assert found.json("x").to_pylist() == [shown, None, shown]
        assert found.faults.bad.tolist() == [False, True, False]
        ((fault, _),) = found.faults.each()
        assert fault.text(1).startswith("column x: expected UTF-8, ")
        assert texts_of(column).null_count == 1


def test_lists_within_each_other_are_one_row_of_numbers() -> None:
    """The same for JSON texts; the counts give each row's number of values."""
    lists = [[[1, 2], [3]], [[4]], None]
    texts = ["[[1, 2], [3]]", "[4]", None]
    for column in (pa.array(lists), cells(texts).lists("x")):
        counts, flat = flattened(column)
        assert counts.tolist() == [3, 1, 0]
        assert to_numbers(flat)[0].tolist() == [1, 2, 3, 4]
    odd = flattened(cells(["[1, 2]", "[1", "5"]).lists("x"))
    assert odd[0].tolist() == [2, 0, 1]


def test_texts_of_floats_of_16_bits() -> None:
    """Their largest number is below 2^53, with which whole ones are compared."""
    whole = pa.array([1, 2048], pa.int32()).cast(pa.float32()).cast(pa.float16())
    assert texts_of(whole).to_pylist() == ["1", "2048"]
