"""What people are shown."""

from __future__ import annotations

import pytest

from headrace.output.console import moment


@pytest.mark.parametrize(
    ("micros", "shown"),
    [
        (None, ""),
        (0, "1970-01-01 00:00:00"),
        (-1_000_000, "1969-12-31 23:59:59"),
        (-(2**62), f"{-(2**62)} us"),
        (2**62, f"{2**62} us"),
    ],
)
def test_a_moment_is_shown_whatever_a_client_sent(micros: int | None, shown: str) -> None:
    """Law: one odd `ts` does not end a listing; what no calendar has is shown as its number."""
    assert moment(micros) == shown
