"""The fault suite is complete: every scenario loads, every broken build can be planted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults import mutants, scenario
from tests.faults.__main__ import EVERY, judge, runs
from tests.faults.account import Account
from tests.faults.crash import tell_restarts
from tests.faults.mutants import Mutant, MutantError, Patch
from tests.faults.scenario import Scenario, Verdict

HERE = Path(__file__).parent


def test_a_run_in_which_nothing_was_acknowledged_holds_nothing() -> None:
    """Law: an empty account never passes."""
    verdict, empty = Verdict(), Account()
    empty.judge(verdict)
    assert set(verdict.faults) == {"idle"}
    some = Account(*(Counter([1.0]) for _ in range(3)))
    some.judge(verdict := Verdict())
    assert verdict.faults == {}


def test_every_scenario_is_told_of() -> None:
    """docs/faults.md has a row for each."""
    page = (HERE.parent.parent / "docs" / "faults.md").read_text()
    assert [name for name in EVERY if f"\n| `{name}` |" not in page] == []


@pytest.mark.parametrize("name", EVERY)
def test_a_scenario_has_a_law_and_sizes(name: str) -> None:
    """A name in the list is a module with a scenario of that name; long is at least quick."""
    found = scenario.load(name)
    assert found.name == name
    assert found.law
    assert 0 < found.quick <= found.long
    assert 0 < found.planted <= found.long  # a run that has caught its build ends


def test_no_scenario_is_forgotten() -> None:
    """Every module that defines a scenario or plants mutants is on its list."""
    files = {".".join(p.relative_to(HERE).with_suffix("").parts): p for p in HERE.rglob("*.py")}
    sources = {name: path.read_text() for name, path in files.items()}
    found = {name.rpartition(".")[2] for name, s in sources.items() if "\nSCENARIO = " in s}
    assert found == set(EVERY)
    assert {n for n in sources if n.startswith("loop.")} >= {f"loop.{n}" for n in scenario.LOOP}
    assert {n for n, s in sources.items() if "\n@mutant(" in s} == set(mutants.FILES)


@pytest.mark.parametrize("name", mutants.every())
def test_a_mutant_changes_the_build_and_leaves_no_trace(name: str) -> None:
    """Each replaces something that is there, names scenarios that exist, and is taken back."""
    mutant = mutants.find(name)
    assert mutant.text
    assert mutant.symptoms
    assert set(mutant.symptoms) <= {*EVERY, *scenario.ATTACKS}
    patch = Patch()
    mutant.plant(patch)
    changed = [(owner, name, vars(owner)[name], before) for owner, name, before in patch._undo]
    patch.undo()
    assert changed
    for owner, attribute, broken, before in changed:
        assert broken is not before
        assert vars(owner)[attribute] is before


def test_a_mutant_whose_target_is_gone_is_an_error() -> None:
    """A renamed method must not turn a planted fault into a sound build."""
    with pytest.raises(MutantError, match="follow the code"):
        Patch().replace(Patch, "renamed", lambda self: None)
    with pytest.raises(MutantError, match="follow the code"):
        Patch().original(Patch, "renamed")


def test_only_its_own_symptom_catches_a_mutant() -> None:
    """A verdict that fails for another reason says nothing about the planted fault."""
    law = Scenario(
        name="s", law="l", unit="u", quick=1, long=1, planted=1, run=lambda trial: Verdict()
    )
    mutant = Mutant("m", "text", {"s": "lost"}, lambda patch: None)
    words = []
    for kind in ("", "lost", "slow"):
        verdict = Verdict()
        verdict.require(not kind, kind, "text")
        words.append((judge(law, None, verdict), judge(law, mutant, verdict)))
    assert words == [("held", "missed"), ("failed", "caught"), ("failed", "missed")]


def test_a_slow_restart_is_a_fault_in_the_median_only() -> None:
    """A fault is reported only if the median of a supervised collector's restarts is too slow, and
    only for a build that is judged by it."""
    faults = []
    for seconds, judged in (([0.1, 0.2, 9.0], True), ([0.1, 0.8, 0.9], True), ([1.0] * 3, False)):
        verdict = Verdict()
        tell_restarts(verdict, {"ready_again": seconds, "started_again": [1.0] * 3}, judged=judged)
        faults.append(set(verdict.faults))
    assert faults == [set(), {"slow"}, set()]


def test_all_pairs_run_without_a_name() -> None:
    """No argument: each scenario on this build, then each broken build where it must show."""
    pairs = [(s.name, m.name if m else None) for s, m in runs(None, None)]
    assert pairs[: len(EVERY)] == [(name, None) for name in EVERY]
    planted = [
        (symptom, name)
        for name, broken in mutants.every().items()
        for symptom in broken.symptoms
        if symptom in EVERY
    ]
    assert pairs[len(EVERY) :] == planted
