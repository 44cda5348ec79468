"""The result of a benchmark: a figure and a named baseline from the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One claim: `value` and `baseline_value` in `unit`, and what their ratio should be.

    `aim` is text, for example ">= 0.8"; `met` compares it with the ratio.
    """

    name: str
    value: float
    unit: str
    baseline_name: str
    baseline_value: float
    aim: str = ""

    @property
    def ratio(self) -> float:
        return self.value / self.baseline_value if self.baseline_value else float("nan")

    @property
    def met(self) -> bool | None:
        """Whether the ratio meets the aim; None without an aim."""
        if not self.aim:
            return None
        sign, number = self.aim.split()
        return self.ratio >= float(number) if sign == ">=" else self.ratio <= float(number)


def render(figures: Sequence[Figure]) -> str:
    """The figures as one aligned table."""
    head = ("what", "value", "unit", "baseline", "its value", "ratio", "aim", "")
    lines = [head, *(_line(figure) for figure in figures)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _line(figure: Figure) -> tuple[str, ...]:
    verdict = {True: "met", False: "missed", None: ""}[figure.met]
    return (
        figure.name,
        f"{figure.value:,.4g}",
        figure.unit,
        figure.baseline_name,
        f"{figure.baseline_value:,.4g}",
        f"{figure.ratio:.2f}",
        figure.aim,
        verdict,
    )
