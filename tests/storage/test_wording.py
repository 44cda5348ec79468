"""A message agrees with its number."""

from storage.wording import counted


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(n, "row") for n in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]
    assert counted(1, "event waits", "events wait") == "1 event waits"
    assert counted(2.0, "event waits", "events wait") == "2 events wait"
