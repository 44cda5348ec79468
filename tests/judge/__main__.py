"""`make judge`: how often the judge is wrong, and how often it decides, by case and bound.

The numbers in the table are shares of repetitions. The exit status is 1 if a one-sided 99.9 %
binomial bound excludes a target; the target for rejected sound logs applies to each case, and to
all cases together.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from tests.judge import cross_fit, early_ends, groups, margins, paired, segments
from tests.judge.cases import Case, equal_or_worse, power
from tests.judge.tally import repetitions_of, tallied, too_often_refused
from tests.judge.unsound import unsound


def all_cases() -> Iterator[Case]:
    """The cases of all modules."""
    yield from equal_or_worse()
    yield from power()
    yield from margins.at_margin()
    yield from margins.decided()
    yield from margins.ranges()
    yield from unsound()
    yield from early_ends.equal()
    yield from early_ends.different()
    yield from segments.equal()
    yield from segments.richer()
    yield from cross_fit.equal()
    yield from cross_fit.better()


COLUMNS = ("better", "worse", "cannot tell")


def main() -> int:
    """Run all cases, or those whose names contain a word; return the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.judge", description=__doc__)
    options.add_argument("--repetitions", type=int, default=2000)
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--case", default="", help="part of a case's name")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = options.parse_args()
    print("| case, bar | bound | better | worse | cannot tell | coverage | refused | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    began, failed = time.monotonic(), 0
    sound: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    names = [one.name for one in all_cases() if given.case in one.name]
    work = partial(_one, repetitions=given.repetitions, seed=given.seed)
    with ProcessPoolExecutor(given.jobs) as pool:
        for lines in pool.map(work, names):
            for one in lines:
                print(one.text, flush=True)
                failed += one.failed
                if one.refused is not None:
                    sound[one.bound] += one.repetitions
                    refused[one.bound] += one.refused
    for bound, logs in sound.items():
        wrong = too_often_refused(refused[bound], logs)
        failed += wrong
        word = "FAILED" if wrong else "held"
        print(f"| all sound logs | {bound} | | | | | {refused[bound] / logs:.4f} | {word} |")
    failed += _groups(given.case, given.repetitions, given.seed)
    failed += _paired(given.case, given.jobs)
    seconds = time.monotonic() - began
    print(f"\n{given.repetitions} repetitions a case, seed {given.seed}, {seconds:.0f} s.")
    print("Every target holds." if not failed else f"{failed} lines FAILED.")
    return 1 if failed else 0


def _groups(part: str, repetitions: int, seed: int) -> int:
    """Print the promises about several judgements, and return the number of failed lines."""
    found = [one for one in groups.groups(repetitions) if part in one.name]
    if not found:
        return 0
    print("\n| wrongly called better | repetitions | share | target | |")
    print("|---|---|---|---|---|", flush=True)
    failed = 0
    for one in found:
        text, wrong = one.line(seed)
        print(text, flush=True)
        failed += wrong
    return failed


def _paired(part: str, jobs: int) -> int:
    """Print the comparison with release 0.1.0, and return the number of failed lines."""
    names = [one for one in paired.names() if part in one]
    if not names:
        return 0
    print("\n| better in the same logs | 0.1.0 | now | plain t | lost | |")
    print("|---|---|---|---|---|---|", flush=True)
    failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        for lines in pool.map(paired.paired, names):
            for one in lines:
                print(one.text, flush=True)
                failed += one.failed
    return failed


class Line(NamedTuple):
    """The results of one case and bound."""

    text: str
    failed: bool
    bound: str
    refused: int | None  # of a sound case
    repetitions: int


def _one(name: str, repetitions: int, seed: int) -> list[Line]:
    """The lines of one case."""
    (case,) = (one for one in all_cases() if one.name == name)
    lines = []
    for one in tallied(case, repetitions, seed):
        shares = " | ".join(f"{one.share(verdict):.4f}" for verdict in COLUMNS)
        coverage = one.covered / max(1, one.compared)
        why = "; ".join(one.failures())
        text = f"| {name} | {one.bound} | {shares} | {coverage:.4f} "
        text += f"| {one.refused / one.repetitions:.4f} | {'FAILED: ' + why if why else 'held'} |"
        refused = one.refused if case.sound else None
        lines.append(Line(text, bool(why), one.bound, refused, repetitions_of(case, repetitions)))
    return lines


if __name__ == "__main__":
    sys.exit(main())
