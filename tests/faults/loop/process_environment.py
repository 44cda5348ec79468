"""The environment variables by which a process of the loop is broken or watched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.faults import mutants
from tests.faults.loop import trainer_witness
from tests.faults.mutants import Mutant

ROOT = Path(__file__).parents[3]


def environment(mutant: Mutant | None, watched: Path | None = None) -> dict[str, str]:
    """The environment of a process and of its children."""
    found = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "site"), str(ROOT)])}
    if mutant is not None:
        found["FAULTS_MUTANT"] = mutant.name
    if watched is not None:
        found["FAULTS_WITNESS"] = str(watched)
    return found


def begin(command: Sequence[str]) -> None:
    """Apply the mutant and the witness that this process's environment names."""
    name = os.environ.get("FAULTS_MUTANT")
    if name is not None:
        mutants.find(name).plant(mutants.Patch(delay=mutants.DELAY_SECONDS))
    watched = os.environ.get("FAULTS_WITNESS")
    if watched is not None and "--follow" in command:
        trainer_witness.begin(Path(watched))
