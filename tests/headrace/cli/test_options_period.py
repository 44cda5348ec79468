"""Laws of --since and --until: ISO 8601, UTC by default, and in order."""

from __future__ import annotations

import pytest

from headrace.cli.options import period

DAY = 1_795_392_000_000_000


def test_a_date_is_its_midnight_in_utc() -> None:
    """A given time zone is used; an omitted option sets no bound."""
    assert period(None, None) == {"since": None, "until": None}
    found = period("2026-11-23", "2026-11-23T08:00+02:00")
    assert found == {"since": DAY, "until": DAY + 6 * 3_600_000_000}
    assert period(None, "2026-11-23T00:00:00.000001Z")["until"] == DAY + 1


@pytest.mark.parametrize(
    ("since", "until", "text"),
    [
        ("yesterday", None, "--since: expected a date of ISO 8601, got 'yesterday'"),
        (None, "2026-13-01", "--until: expected a date"),
        ("2026-11-24", "2026-11-23", "--until: expected a time after --since"),
    ],
)
def test_what_is_no_period_is_refused(since: str | None, until: str | None, text: str) -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match=text):
        period(since, until)
