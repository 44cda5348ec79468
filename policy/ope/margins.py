"""By how much a candidate has to be better than a bar: `--margin`.

    Margin.parse("0.02")     # better by at least 0.02 of reward per episode
    Margin.parse("-1%")      # not worse by more than 1 % of the bar's value

A verdict compares the candidate with the bar's value plus the margin. A share of the bar's value is
estimated from the same episodes, so its error is part of the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Margin:
    """A difference in reward per episode, or a share of the absolute value of the bar."""

    size: float = 0.0
    relative: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.size) or (self.relative and abs(self.size) >= 1):
            raise ValueError(
                f"margin: expected a finite number, or less than 100 % of the bar, got {self}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a number, or a percentage of the bar's value such as "1%". Raises ValueError."""
        number = text.strip()
        relative = number.endswith("%")
        try:
            size = float(number.removesuffix("%"))
        except ValueError:
            raise ValueError(
                f"margin: expected reward per episode such as 0.02, or 1% of the bar, got {text!r}"
            ) from None
        return cls(size / 100 if relative else size, relative)

    def __str__(self) -> str:
        return f"{self.size * 100:.12g}%" if self.relative else f"{self.size:.12g}"
