"""Rewards counted up to a cap, for sums of money: `--reward-cap`.

    cap = parse_cap("50")            # or "auto"
    proposed_cap(rewards)            # from the first tenth of a log, which is then not judged

A few large amounts can make up most of the variance of a mean, so that no interval for it is
reliable. The mean of min(reward, cap) can be judged. It is another question, whose answer is the
same if the candidate does not earn less in the amounts above the cap.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.ope.diagnostics import Diagnostic, at_most
from storage.wording import counted

FloatArray = npt.NDArray[np.float64]

AUTO: Literal["auto"] = "auto"
Cap: TypeAlias = float | Literal["auto"] | None
REWARD_CAP = "reward_cap"
"""The name of the note that rewards are capped."""
FIRST_SHARE = 0.1
"""The share of the episodes, the earliest, from which `auto` takes the cap."""
LARGEST_SQUARE = 0.01
"""The largest part of the sum of squares that one reward may have in these episodes. The whole log
has ten times as many, which leaves a factor of 100 for the weights before `heavy_tails` fails."""


def parse_cap(text: str | float | None) -> Cap:
    """Parse a finite number or "auto"; None is no cap. Raises ValueError."""
    if text is None:
        return None
    if text == AUTO:
        return AUTO
    try:
        cap = float(text)
    except ValueError:
        cap = math.nan
    if not math.isfinite(cap):
        raise ValueError(f"reward_cap: expected a finite number or auto, got {text!r:.40}")
    return cap


def proposed_cap(rewards: FloatArray) -> float | None:
    """The highest cap at which one reward has at most 1 % of the sum of squares, two digits.

    None if no reward has more without a cap, or if there are too few rewards above 0 for any.
    """
    gains = np.sort(rewards[rewards > 0])[::-1]
    if not gains.size:
        return None
    # capped at the i-th largest c, the sum of squares is (i + 1) c^2 + that of the smaller ones
    below = np.cumsum(gains[::-1] ** 2)[::-1] - gains**2
    rises = np.arange(1, gains.size + 1) * gains**2 + below
    enough = np.flatnonzero(gains**2 <= LARGEST_SQUARE * rises)
    if not enough.size or enough[0] == 0:
        return None
    return float(f"{gains[enough[0]]:.2g}")


def cap_note(cap: float, above: int, steps: int) -> Diagnostic:
    """The note that min(reward, cap) is judged; `above` of the judged steps earned more."""
    share = above / max(1, steps)
    sentence = (
        f"judged is min(reward, {cap:g}): {counted(above, 'step')} ({share:.2%}) earned more and "
        f"{'counts' if above == 1 else 'count'} as {cap:g}"
    )
    return at_most(REWARD_CAP, share, None, sentence, "--reward-cap")
