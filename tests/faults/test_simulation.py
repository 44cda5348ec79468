"""The first histories of the simulated fault scenarios; `make faults` plays thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import mutants, scenario
from tests.faults.scenario import Trial


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("simulation", ("acknowledged", "crashes")),
        ("restore", ("acknowledged_before", "kept_back")),
    ],
)
def test_the_first_histories_lose_and_double_nothing(
    name: str, reached: tuple[str, ...], tmp_path: Path
) -> None:
    """Histories with full disks and crashes are among them, so that a change of what the simulated
    machine has to offer shows in every run."""
    verdict = scenario.load(name).run(Trial(seed=7, folder=tmp_path, size=40))
    assert verdict.faults == {}
    assert all(verdict.counts[one] > 0 for one in reached)


def test_a_broken_build_is_caught_by_its_symptom(tmp_path: Path) -> None:
    """A build that acknowledges before the commit loses steps in the same histories."""
    trial = Trial(
        seed=7,
        folder=tmp_path,
        size=400,
        mutant=mutants.find("ack-before-commit"),
        symptoms=frozenset({"lost"}),
    )
    assert "lost" in scenario.load("simulation").run(trial).faults
