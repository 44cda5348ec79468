"""Logs on which the judge has to decide as often as release 0.1.0 did.

`release_0_1_0.json` has that release's verdicts, a letter per log: better, worse, cannot tell. The
same logs are drawn again: repetition i of a case has its own seed. A line fails if the logs that
only the release called better, less the logs that only this build calls better, are more than 3 %
of all, by a one-sided 99 % binomial bound.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import bdtrc, stdtrit

from policy.ope.judgement import Rules, judge
from tests.judge.cases import Case
from tests.judge.segments import promised

RELEASE = Path(__file__).parent / "release_0_1_0.json"
MOST_LOST = 0.03
CERTAINTY = 0.01
SEED = 7


@dataclass(frozen=True)
class Paired:
    """The verdicts of both builds on the logs of one case, and those of a plain t."""

    name: str
    before: str
    now: str
    plain: float  # the share of logs in which Student's t of the differences is above 0

    @property
    def lost(self) -> int:
        """Logs called better before and not now, less the reverse."""
        return self.before.count("b") - self.now.count("b")

    @property
    def failed(self) -> bool:
        return self.lost > 0 and bool(bdtrc(self.lost - 1, len(self.before), MOST_LOST) < CERTAINTY)

    @property
    def text(self) -> str:
        before, now = (one.count("b") / len(one) for one in (self.before, self.now))
        net = f"{self.lost / len(self.before):+.3f}"
        word = "FAILED" if self.failed else "held"
        return f"| {self.name} | {before:.3f} | {now:.3f} | {self.plain:.3f} | {net} | {word} |"


def paired(name: str) -> Paired:
    """Judge the logs of one name in RELEASE, a case and a bound."""
    before = json.loads(RELEASE.read_text())[name]
    case_name, _, bound = name.rpartition(", ")
    (case,) = (one for one in promised() if one.name == case_name)
    rules = Rules(reward_range=case.reward_range if bound == "betting" else None)
    now, above = "", 0
    for number in range(len(before)):
        verdict, t = judged(case, number, rules)
        now += verdict[0]
        above += t > stdtrit(case.n - 1, 0.975)
    return Paired(name, before, now, above / len(before))


def judged(case: Case, number: int, rules: Rules) -> tuple[str, float]:
    """(the verdict on one log, Student's t of the difference)."""
    rng = np.random.default_rng([SEED, zlib.crc32(case.name.encode()), number])
    data, candidate, bar = case.make(rng)
    found = judge(data, candidate, [bar], rules)
    (one,) = found.comparisons
    return found.verdict, one.difference / one.stderr


def names() -> list[str]:
    """All cases and bounds with verdicts of the release."""
    return list(json.loads(RELEASE.read_text()))
