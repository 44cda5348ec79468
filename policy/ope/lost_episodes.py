"""Whether episodes are lost alike, whatever the policy does.

    lost = LostEpisodes(MemoryColumn)
    lost.add(judged, weights, None)
    lost.check("lost_by_action", "the logging policy", (-1.0, 4.0), str)

A lost episode (abandoned or broken) is judged with the policy's default reward. If losses depend on
the action, that reward decides, although nobody observed it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from policy.ope.betting import wealth_against
from policy.ope.columns import NumberColumn, UnitNumbers, combined, mean_of
from policy.ope.diagnostics import Diagnostic
from storage.wording import counted

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

ERROR = 0.0001
"""Of each direction, in a log whose losses do not depend on the action."""


class WithLosses(Protocol):
    """n episodes; `policy.ope.judgement.Judged`."""

    @property
    def lost(self) -> BoolArray | None: ...
    @property
    def by(self) -> FloatArray: ...
    @property
    def ends(self) -> IntArray: ...
    @property
    def taken(self) -> IntArray | None: ...
    @property
    def units(self) -> IntArray | None: ...


class LostEpisodes:
    """The lost episodes of a log, weighted by what sets a candidate apart from a bar."""

    def __init__(self, column: Callable[[], NumberColumn]) -> None:
        self._apart = UnitNumbers(column)
        self._lost, self._all = np.zeros(1, np.int64), np.zeros(1, np.int64)  # by the last action
        self._episodes = self._among = 0
        self._by = self._most_by = 0.0

    def add(self, data: WithLosses, weights: FloatArray, others: FloatArray | None) -> None:
        """Add n episodes with the candidate's weights (S,) and the bar's (S,); None: 1."""
        lost, ends, by = data.lost, data.ends, data.by
        self._episodes += ends.size
        self._by, self._most_by = self._by + by.sum(), max(self._most_by, float(by.max()))
        if lost is None:
            lost = np.zeros(ends.size, np.bool_)
        self._among += int(lost.sum())
        apart = by * (weights[ends] - (1.0 if others is None else others[ends]))
        # among the lost ones the mean is 0, too; units need their other episodes for their means
        if data.units is None:
            self._apart.add(apart[lost], None)
        else:
            self._apart.add(apart * lost, data.units)
        if data.taken is not None:
            last = data.taken[ends]
            size = max(self._all.size, int(last.max()) + 1)
            self._all, self._lost = (
                np.pad(known, (0, size - known.size)) + np.bincount(new, minlength=size)
                for known, new in ((self._all, last), (self._lost, last[lost]))
            )

    def check(
        self,
        name: str,
        bar: str,
        limits: tuple[float, float],
        action: Callable[[int], str],
    ) -> Diagnostic:
        """Whether the candidate loses as many episodes as the bar, by betting both ways.

        With the weight w of a whole episode, the mean of w [lost] is the policy's share of lost
        episodes (Horvitz & Thompson 1952). If losses do not depend on actions, w - w' has mean 0
        over the lost episodes; one logged with probability p counts 1 / p times. `limits` of
        w - w'; without a limit on its own side a direction is not tested. `action` names an action.
        """
        if not self._among:
            return _diagnostic(name, 0.0, "no episode was abandoned or broken")
        numbers = self._apart.means()
        share = self._among / self._episodes
        difference = mean_of(numbers) * (1 if self._apart.by_unit else share)
        difference *= self._episodes / self._by
        least, most = (end * self._most_by for end in limits)
        wealth = -math.inf
        if math.isfinite(least):
            wealth = wealth_against(numbers, 0.0, least=least, error=ERROR)
        if math.isfinite(most):
            fewer = combined(np.negative, numbers)
            wealth = max(wealth, wealth_against(fewer, 0.0, least=-most, error=ERROR))
        sentence = (
            f"{counted(self._among, 'episode')} ({share:.2%}) abandoned or broken; by weight the "
            f"candidate's share differs by {difference:+.2%} from that of {bar}"
        )
        if failed := wealth > math.log(1 / ERROR):
            sentence += (
                f"{self._most(action)}: whether an episode is lost depends on the action, and its "
                "reward is unknown; fix the cause, or use a canary"
            )
        return _diagnostic(name, difference, sentence, passed=not failed)

    def _most(self, action: Callable[[int], str]) -> str:
        """The action with the largest share of lost episodes, as text."""
        if not self._all.any():
            return ""
        shares = self._lost / np.maximum(1, self._all)
        worst = int(shares.argmax())
        return f" (most after {action(worst)}: {shares[worst]:.1%})"


def _diagnostic(name: str, value: float, sentence: str, *, passed: bool = True) -> Diagnostic:
    source = "a bet against equal shares of lost episodes, each way at 0.0001 (Ville 1939)"
    return Diagnostic(
        name=name, value=value, threshold=0.0, passed=passed, sentence=sentence, source=source
    )
