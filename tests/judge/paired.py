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

from tests.judge.segments import promised
from tests.judge.tally import bounds_of, judgements

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


def paired(case_name: str) -> list[Paired]:
    """Judge the logs of one case by each bound in RELEASE."""
    release = json.loads(RELEASE.read_text())
    (case,) = (one for one in promised() if one.name == case_name)
    rules = {bound: one for bound, one in bounds_of(case).items() if bound != "sequence"}
    before = {bound: release[f"{case_name}, {bound}"] for bound in rules}
    now, above = dict.fromkeys(rules, ""), dict.fromkeys(rules, 0)
    for number in range(max(map(len, before.values()))):
        rng = np.random.default_rng([SEED, zlib.crc32(case_name.encode()), number])
        for bound, found in judgements(case.make(rng), rules).items():
            (one,) = found.comparisons
            now[bound] += found.verdict[0]
            above[bound] += one.difference / one.stderr > stdtrit(case.n - 1, 0.975)
    return [
        Paired(f"{case_name}, {bound}", before[bound], now[bound], above[bound] / len(now[bound]))
        for bound in rules
    ]


def names() -> list[str]:
    """All cases with verdicts of the release."""
    return [one.name for one in promised()]
