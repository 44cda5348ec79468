"""Algorithms by name: each one has explained settings and trains."""

from __future__ import annotations

import pytest

from policy.algorithms.by_name import ALGORITHMS, algorithm
from policy.algorithms.settings import settings_of


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_says_what_it_means(name: str) -> None:
    """The help of `train` and `up` has nothing else to show."""
    for one in settings_of(type(ALGORITHMS[name])):
        assert one.meaning
        assert "typing" not in one.expected


def test_a_name_and_settings_choose_a_config() -> None:
    """Text is converted; what isn't named stays at its default."""
    found = algorithm("ips", updates="30", entropy_coeff=0.1)
    assert (found.objective, found.updates, found.entropy_coeff) == ("ips", 30, 0.1)  # type: ignore[attr-defined]
    assert algorithm("cql") == ALGORITHMS["cql"]


def test_an_unknown_algorithm_comes_with_those_near_it() -> None:
    """In one sentence."""
    with pytest.raises(
        ValueError, match=r"algorithm: expected one of dr, .*, got 'marvil'; near marvil: marwil"
    ):
        algorithm("marvil")
