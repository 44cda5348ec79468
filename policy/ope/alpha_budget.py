"""The error of many candidates that are judged by the same episodes.

    confidence_of(3, 0.95, None)     # of the third candidate's interval

The first candidate has an error of its own. Each further one on overlapping episodes gets a share
of one budget, so that all errors together keep it: candidate k gets 6 / (pi k)^2. The sum of these
over all k is 1 (the Basel problem), and the first one's own error is below its share. New episodes,
which none of them was judged by, start a new budget.
"""

from __future__ import annotations

import math

from policy.ope.diagnostics import Diagnostic, at_most
from storage.wording import counted

CANDIDATES = "candidates"
"""The name of the note about other candidates."""


def confidence_of(number: int, confidence: float, budget: float | None) -> float:
    """The confidence of candidate `number` on the same episodes, counted from 1.

    `confidence` is that of a single candidate. `budget`, the error of all together in one
    direction, is by default twice the error of a single one, from the second candidate on.
    """
    if budget is None:
        if number == 1:
            return confidence
        budget = 1 - confidence
    if not 0 < budget < 1:
        raise ValueError(f"alpha_budget: expected a probability in (0, 1), got {budget}")
    return 1 - 2 * budget * _share(number)


def candidates_note(number: int, confidence: float, budget: float | None) -> list[Diagnostic]:
    """The price of candidate `number` and what is left of the budget; nothing for the first one."""
    if number == 1:
        return []
    plain, total = (1 - confidence) / 2, 1 - confidence if budget is None else budget
    error = total * _share(number)
    left = total * (1 - sum(_share(k) for k in range(1, number + 1)))
    at_once = 1 - (1 - plain) ** number
    sentence = (
        f"candidate {number} on overlapping episodes: its error is {error:.2g} of {total:g} for "
        f"all of them together, and {left:.2g} is left. At {plain:g} each, one or more of "
        f"{counted(number, 'equal candidate')} would be called better with a probability of up to "
        f"{at_once:.2g}; episodes newer than the live version's training (--since live) start anew"
    )
    return [at_most(CANDIDATES, number, None, sentence, "6 / (pi k)^2 of the budget")]


def _share(number: int) -> float:
    return 6 / (math.pi * number) ** 2
