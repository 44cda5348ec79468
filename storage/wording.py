"""Words of messages that depend on a number."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: float, one: str, many: str = "") -> str:
    """`1 row`, `2,000 rows`: a whole number with its noun; `many` is the plural if not `one`s."""
    text = f"{number:,.0f}"
    return f"{text} {one if text == '1' else many or f'{one}s'}"
