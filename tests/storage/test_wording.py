"""A message agrees with its number."""

from storage.wording import counted, rounded_up


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(n, "row") for n in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]
    assert counted(1, "event waits", "events wait") == "1 event waits"
    assert counted(2.0, "event waits", "events wait") == "2 events wait"


def test_an_estimated_number_has_two_digits() -> None:
    """Rounded up; a number below 1 is at least 1 once it is above 0."""
    assert [rounded_up(n) for n in (0, 0.2, 7, 99, 101, 12_345)] == [0, 1, 7, 99, 110, 13_000]
