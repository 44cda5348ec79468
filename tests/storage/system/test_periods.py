"""Periods between two times; how their texts are read: tests/policy/data/test_log_options.py."""

import pytest

from storage.system.periods import require_period

DAY = 1_795_392_000_000_000


def test_a_period_ends_after_it_starts() -> None:
    """An omitted option sets no bound, and `live` is not known here."""
    for since, until in ((None, DAY), (DAY, None), ("live", DAY), (DAY, DAY + 1)):
        require_period(since, until)
    for until in (DAY, DAY - 1):
        with pytest.raises(ValueError, match=r"--until: expected a time after --since 2026-11-23"):
            require_period(DAY, until)
