"""A message agrees with its number."""

from storage.wording import counted, duration, rounded_up


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(n, "row") for n in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]
    assert counted(1, "event waits", "events wait") == "1 event waits"
    assert counted(2.0, "event waits", "events wait") == "2 events wait"


def test_an_estimated_number_has_two_digits() -> None:
    """Rounded up; a number below 1 is at least 1 once it is above 0."""
    assert [rounded_up(n) for n in (0, 0.2, 7, 99, 101, 12_345)] == [0, 1, 7, 99, 110, 13_000]


def test_a_duration_is_in_the_units_that_people_use() -> None:
    """However long, nothing is rounded away."""
    expected = {
        604_800: "7 days",
        86_401: "1 day 1 second",
        5_400: "1 hour 30 minutes",
        0: "0 seconds",
    }
    expected |= {30.0: "30 seconds", 0.5: "0.5 seconds", 60.25: "1 minute 0.25 seconds"}
    assert {seconds: duration(seconds) for seconds in expected} == expected
