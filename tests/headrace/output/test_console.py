"""Output for people."""

from __future__ import annotations

import re

import pytest

from headrace.output import results
from headrace.output.console import counting, moment


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


def test_counts_of_verify_are_all_written_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Each count has commas between its thousands, like those of the findings."""
    results.verified(
        {
            "streams": [],
            "acknowledged": 4_000,
            "in_shards": 1_500,
            "in_journal": 2_500,
            "erased": 0,
            "retained_out": 1_200,
            "earlier": 3_000,
            "second_reader": {"reader": "fastparquet", "shards": 1_000, "rows": 4_500},
            "notes": [],
            "logs": {"default": [{"name": "propensities", "sentence": "the mean is 1"}]},
            "quarantined": [],
            "findings": [],
            "ok": True,
        }
    )
    lines = capsys.readouterr().out.splitlines()
    assert (
        "Steps acknowledged: 4,000; in shards 1,500, in the journal 2,500, retained out 1,200"
        in lines
    )
    assert "log of default: propensities: the mean is 1" in lines
    assert "In streams of earlier journals: 3,000" in lines
    assert "Read again by fastparquet: shards 1,000, rows 4,500" in lines


def test_rows_are_counted_on_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows, their rate and those left out; a line at most every so many seconds."""
    with counting(every=0.0) as tell:
        tell(1, 0)
        tell(2_000, 12)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"1 row, [\d,]+ a second, 0 left out", first)
    assert re.fullmatch(r"2,000 rows, [\d,]+ a second, 12 left out", second)
    with counting(every=1e9) as tell:
        tell(1, 0)
    assert capsys.readouterr().err == ""
