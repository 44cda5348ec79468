"""Repeat a case, count the verdicts, and compare the counts with their targets."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import bdtr, bdtrc

from policy.ope.diagnostics import Diagnostic
from policy.ope.judgement import Bar, Evidence, Judged, Judgement, Rules, TargetPolicy
from policy.ope.repeats import Repeats
from tests.judge.cases import Case

FALSE_BETTER = FALSE_WORSE = 0.025
COVERAGE = 0.95
SOUND_REFUSED = 0.001
LARGE = 100_000  # episodes
OF_STUDENT = {"heavy_tails", "reward_events"}
"""Checks by which Student's t does without a verdict, on sound logs, too."""
CERTAINTY = 0.001
"""A line fails when what was counted would come less often than this at its target."""


@dataclass
class Tally:
    """The counts of one case and bound: verdicts, intervals that held the truth, refusals."""

    case: Case
    bound: str
    repetitions: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    covered: int = 0
    compared: int = 0
    refused: int = 0  # by a check of the log
    unnamed: int = 0  # refused, but not by the check that names the cause
    unexplained: int = 0  # verdicts without a reason, or without naming what is missing

    def add(self, found: Judgement) -> None:
        self.repetitions += 1
        self.verdicts[found.verdict] = self.verdicts.get(found.verdict, 0) + 1
        for one in found.comparisons:
            low, high = one.interval
            self.compared += 1
            # An interval with an end at the truth, up to rounding, contains it. A share of the bar
            # is a margin only as estimated, so the difference beyond it has the promised coverage.
            beyond = self.case.difference + one.margin
            self.covered += low - 1e-12 <= beyond <= high + 1e-12
        failed = {one.name for one in found.diagnostics if not one.passed}
        self.refused += bool({one.removeprefix("live_") for one in failed} - OF_STUDENT)
        self.unnamed += bool(failed) and self.case.cause not in {"", *failed}
        text = " ".join(found.reasons)
        missing = found.verdict == "cannot tell" and not re.search("more|canary|fix|check", text)
        self.unexplained += missing or (found.verdict != "better" and not text)

    def share(self, verdict: str) -> float:
        return self.verdicts.get(verdict, 0) / self.repetitions

    def failures(self) -> Iterator[str]:
        """The targets that a one-sided 99.9 % binomial bound excludes."""
        exact = self.bound != "student" and self.case.exact
        better = self.verdicts.get("better", 0)
        if self.case.difference <= 0 and too_many(better, self.repetitions, FALSE_BETTER):
            yield f"false better {better / self.repetitions:.3f} > {FALSE_BETTER}"
        worse = self.verdicts.get("worse", 0)
        if self.case.difference >= 0 and too_many(worse, self.repetitions, FALSE_WORSE):
            yield f"false worse {worse / self.repetitions:.3f} > {FALSE_WORSE}"
        if self.unnamed:
            yield f"{self.unnamed} logs refused without the cause, {self.case.cause}"
        if (exact or self.case.normal) and _too_few(self.covered, self.compared, COVERAGE):
            yield f"coverage {self.covered / self.compared:.3f} < {COVERAGE}"
        right = self.verdicts.get(self.case.verdict, 0)
        deciding = "betting" if self.case.reward_range is not None else "student"
        if self.bound == deciding and _too_few(right, self.repetitions, self.case.least):
            yield f"{self.case.verdict} {right / self.repetitions:.3f} < {self.case.least}"
        if self.case.sound and too_often_refused(self.refused, self.repetitions):
            yield f"sound logs refused {self.refused / self.repetitions:.4f} > {SOUND_REFUSED}"
        if self.unexplained:
            yield f"{self.unexplained} verdicts without a reason, or what is missing"


def too_often_refused(refused: int, repetitions: int) -> bool:
    """Whether the checks jointly reject sound logs more than once in a thousand."""
    return too_many(refused, repetitions, SOUND_REFUSED)


def too_many(count: int, of: int, target: float) -> bool:
    return count > 0 and bool(bdtrc(count - 1, of, target) < CERTAINTY)


def _too_few(count: int, of: int, target: float) -> bool:
    return target > 0 and bool(bdtr(count, of, target) < CERTAINTY)


class _RepeatsOnce(Repeats):
    """The check of a whole log, which is the same for each bound."""

    _found: Diagnostic | None = None

    def check(self) -> Diagnostic:
        self._found = self._found or super().check()
        return self._found


class _First(Evidence):
    """The evidence that inspects the log."""

    def __init__(self, bar: Bar, rules: Rules) -> None:
        super().__init__([bar.name], rules)
        self._repeats = _RepeatsOnce()


class _Beside(Evidence):
    """The evidence of the same episodes without a range; the first one inspected them."""

    def __init__(self, first: Evidence, bar: Bar, rules: Rules) -> None:
        super().__init__([bar.name], rules)
        self._support, self._propensities = first._support, first._propensities
        self._repeats, self.contexts = first._repeats, first.contexts

    def _inspect(self, *inspected: object) -> None:
        """The first one did."""


def bounds_of(case: Case) -> dict[str, Rules]:
    """The bounds that a case is judged by."""
    asked = Rules(margin=case.margin)
    student = {"student": asked}
    if case.reward_range is None:
        return student
    return {
        "betting": replace(asked, reward_range=case.reward_range),
        **student,
        "sequence": replace(asked, reward_range=case.reward_range, looks=1),
    }


def repetitions_of(case: Case, repetitions: int) -> int:
    """A tenth for large logs."""
    return max(1, repetitions // 10) if case.n >= LARGE else repetitions


def tallied(case: Case, repetitions: int, seed: int, only: Iterable[str] = ()) -> list[Tally]:
    """Repeat the case with each of its bounds (or `only` those), on the same logs."""
    bounds = {name: rules for name, rules in bounds_of(case).items() if not only or name in only}
    tallies = {name: Tally(case, name) for name in bounds}
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    for _ in range(repetitions_of(case, repetitions)):
        for name, found in judgements(case.make(rng), bounds).items():
            tallies[name].add(found)
    return list(tallies.values())


def judgements(
    log: tuple[Judged, TargetPolicy, Bar], bounds: Mapping[str, Rules]
) -> dict[str, Judgement]:
    """The judgements of one log by several bounds; the first one inspects it."""
    data, candidate, bar = log
    known: dict[object, Evidence] = {}
    found = {}
    for name, rules in bounds.items():
        kind = rules.reward_range if data.one_step else None  # of a reward model
        if kind not in known:
            first = next(iter(known.values()), None)
            new = _First(bar, rules) if first is None else _Beside(first, bar, rules)
            new.add(data, candidate, [bar.policy])
            known[kind] = new
        found[name] = known[kind].judged(rules)
    return found
