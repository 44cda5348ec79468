"""The first histories of the simulated fault scenario; `make faults` plays thousands."""

from __future__ import annotations

from pathlib import Path

from tests.faults import mutants, scenario
from tests.faults.scenario import Trial


def test_the_first_histories_lose_and_double_nothing(tmp_path: Path) -> None:
    """Histories with full disks and crashes are among them, so that a change of what the simulated
    machine has to offer shows in every run."""
    verdict = scenario.load("simulation").run(Trial(seed=7, folder=tmp_path, size=40))
    assert verdict.faults == {}
    assert verdict.counts["acknowledged"] > 0
    assert verdict.counts["crashes"] > 0


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
