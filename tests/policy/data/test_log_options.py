"""Laws of --since and --until: ISO 8601, UTC by default, and in order."""

from __future__ import annotations

from typing import Any

import pytest

from policy.data.log_options import Since, SinceLive, Until

DAY = 1_795_392_000_000_000


def parsed(option: Any, text: str) -> Any:
    """What the option makes of a text."""
    return option.__metadata__[-1].extra["parse"](text)


def test_a_date_is_its_midnight_in_utc() -> None:
    """A given time zone is used."""
    assert parsed(Since, "2026-11-23") == DAY
    assert parsed(Until, "2026-11-23T08:00+02:00") == DAY + 6 * 3_600_000_000
    assert parsed(Until, "2026-11-23T00:00:00.000001Z") == DAY + 1
    assert (parsed(SinceLive, "live"), parsed(SinceLive, "2026-11-23")) == ("live", DAY)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        (Since, "yesterday", "--since: expected a date of ISO 8601, got 'yesterday'"),
        (SinceLive, "alive", "--since: expected a date of ISO 8601, got 'alive'"),
        (Until, "2026-13-01", "--until: expected a date"),
    ],
)
def test_what_is_no_date_is_refused(option: Any, value: str, text: str) -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match=text):
        parsed(option, value)
