"""Output for people."""

from __future__ import annotations

import pytest

from headrace.output import results
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
    """Law: an invalid `ts` does not end a listing; one beyond the calendar is shown as a number."""
    assert moment(micros) == shown


def test_a_reason_that_a_token_holder_gave_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A line end or escape sequence in a text starts no line and moves no cursor."""
    one = {"decided": 0, "candidate": "c", "kind": "rollback", "verdict": None, "episodes": None}
    one |= {"published": True, "version": 3, "reasons": ["a\n1970 forged\x1b[2J"], "by": "b\nc"}
    results.decisions({"policy_id": "p", "decisions": [one], "damaged": {}})
    shown = capsys.readouterr().out.splitlines()
    assert shown[2:] == ["  a\\n1970 forged\\x1b[2J", "  by b\\nc"]
