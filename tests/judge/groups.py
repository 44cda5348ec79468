"""Promises about more than one judgement: many candidates on a log, and looks at a canary.

Each line has the share of repetitions with a wrong `better`, and its target.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from policy.ope.alpha_budget import confidence_of
from policy.ope.arms import compare_arms
from policy.ope.judgement import Bar, Judged, Rules, TargetPolicy, judge
from policy.ope.margins import Margin
from tests.judge.tally import too_many

CANDIDATES = 120
LOOKS = (1000, 2000, 4000, 8000, 16_000)


@dataclass(frozen=True)
class Group:
    """Repetitions of one kind; `draw` says whether one had a wrong `better`."""

    name: str
    repetitions: int
    draw: Callable[[np.random.Generator], bool]
    target: float | None  # None: shown for comparison

    def line(self, seed: int) -> tuple[str, bool]:
        """(the line of the table, whether its target is excluded)."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        wrong = sum(self.draw(rng) for _ in range(self.repetitions))
        failed = self.target is not None and too_many(wrong, self.repetitions, self.target)
        target = "" if self.target is None else f"{self.target:g}"
        word = "FAILED" if failed else "held" if target else ""
        text = f"| {self.name} | {self.repetitions:,} | {wrong / self.repetitions:.4f} "
        return f"{text}| {target} | {word} |", failed


def _any_better(rng: np.random.Generator, *, exact: bool, shared: bool, n: int = 1000) -> bool:
    """Whether one of many equal candidates on one log is called better."""
    taken = rng.integers(4, size=n)
    segment = rng.integers(10, size=n)
    data = Judged(
        rewards=(rng.random(n) < 0.5).astype(np.float64),
        lengths=np.ones(n, np.int64),
        behaviour_logp=np.full(n, np.log(0.25)),
        flat=np.eye(10)[segment],
        taken=taken,
    )
    rules = Rules(reward_range=(0.0, 1.0) if exact else None)
    for number in range(1, CANDIDATES + 1):
        probs = np.eye(4)[rng.integers(4, size=10)][segment] * 0.96 + 0.01
        candidate = TargetPolicy(np.log(probs[np.arange(n), taken]), probs)
        confidence = confidence_of(number, 0.95, None) if shared else 0.95
        asked = replace(rules, confidence=confidence)
        if judge(data, candidate, [Bar("log")], asked).verdict == "better":
            return True
    return False


def _canary(
    rng: np.random.Generator,
    *,
    failures: float,
    exact: bool,
    lost: float = 0.0,
    gain: float = 0.0,
    margin: str = "0",
    noted: bool = True,
) -> bool:
    """Whether a canary that is better by just the margin is called better at one of the looks.

    `lost` is the share of the canary's failures that are not logged. Half of the episodes are from
    one source, all of whose losses these are. Unless `noted`, a verdict with a note does not count.
    """
    n = LOOKS[-1]
    in_canary = rng.random(n) < 0.5
    failed = rng.random(n) < failures - gain * in_canary
    source = rng.random(n) < 0.5
    kept = ~(in_canary & failed & (rng.random(n) < 2 * lost) & source)
    for look in LOOKS:
        here = kept[:look]
        own, where = in_canary[:look][here], source[:look][here]
        started = {
            str(name): (int(own[where == name].sum()), int((where == name).sum()))
            for name in (False, True)
        }
        found = compare_arms(
            1.0 - failed[:look][here],
            own,
            np.zeros(own.size, np.bool_),
            share=0.5,
            limits=(0.0, 1.0) if exact else None,
            margin=Margin.parse(margin),
            started=started,
        )
        if found.verdict == "better" and (noted or not found.note):
            return True
    return False


def groups(repetitions: int) -> Iterator[Group]:
    """All lines; many candidates are repeated a tenth as often."""
    few = max(1, repetitions // 10)
    for exact, word in ((True, "with a range"), (False, "without a range")):
        name = f"one of {CANDIDATES} equal candidates, 1,000, {word}"
        alone, shared = (partial(_any_better, exact=exact, shared=one) for one in (False, True))
        yield Group(f"{name}, each alone", few, alone, None)
        yield Group(f"{name}, budget", few, shared, 0.05)
        for failures in (0.2, 0.5):
            canary = partial(_canary, failures=failures, exact=exact)
            name = f"canary equal, failures {failures:g}"
            yield Group(f"{name}, {word}", repetitions, canary, 0.025)
            name, lost = f"{name}, a fifth of them lost, {word}", partial(canary, lost=0.2)
            yield Group(name, repetitions, lost, None)
            yield Group(f"{name}, without a note", repetitions, partial(lost, noted=False), None)
        for margin in ("0.05", "10%"):
            canary = partial(_canary, failures=0.5, exact=exact, gain=0.05, margin=margin)
            name = f"canary +10 %, margin {margin}, {word}"
            yield Group(name, repetitions, canary, 0.025)
