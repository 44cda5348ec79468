"""The endings of episodes, and what follows from each."""

from __future__ import annotations

from typing import get_args

from storage.experience.endings import ENDINGS, OBSERVED, TERMINATED, UNOBSERVED, Ending


def test_each_ending_has_its_properties() -> None:
    """Only a terminated episode is not bootstrapped; two endings were not reported by a client."""
    assert get_args(Ending) == ENDINGS == ("terminated", "truncated", "abandoned", "broken")
    assert {"terminated"} == TERMINATED
    assert OBSERVED == ("terminated", "truncated")
    assert UNOBSERVED == ("abandoned", "broken")
