"""How an episode may end: the words of the column `ended`, and what follows from each.

A new ending is a line of `ENDING_KINDS`, and whatever reports it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Ending: TypeAlias = Literal["terminated", "truncated", "abandoned", "broken"]


@dataclass(frozen=True, slots=True)
class EndingKind:
    """One way to end.

    `terminates`: the environment ended the episode, so nothing is bootstrapped from its last step,
    which has `terminateds`; the others have `truncateds`. `observed`: the client reported the end;
    otherwise the return may be incomplete, and estimators leave the episode out by default.
    `remedy` says what to do about episodes that are left out.
    """

    word: Ending
    terminates: bool
    observed: bool
    remedy: str = ""


ENDING_KINDS = (
    EndingKind("terminated", terminates=True, observed=True),
    EndingKind("truncated", terminates=False, observed=True),  # by a limit
    EndingKind(
        "abandoned",  # no event came within the policy's episode_timeout
        terminates=False,
        observed=False,
        remedy="end episodes with end_episode, or keep these with leave_out=()",
    ),
    EndingKind(
        "broken",  # an event was refused or dropped
        terminates=False,
        observed=False,
        remedy="see why the collector closed them, or keep them with leave_out=()",
    ),
)
"""In ascending order of priority: of several agents' endings the last one is the episode's."""

ENDINGS: tuple[Ending, ...] = tuple(kind.word for kind in ENDING_KINDS)
TERMINATED = frozenset(kind.word for kind in ENDING_KINDS if kind.terminates)
OBSERVED: tuple[Ending, ...] = tuple(kind.word for kind in ENDING_KINDS if kind.observed)
UNOBSERVED: tuple[Ending, ...] = tuple(kind.word for kind in ENDING_KINDS if not kind.observed)
