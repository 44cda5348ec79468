"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(number: float, one: str, many: str = "") -> str:
    """`1 row`, `2,000 rows`: a whole number with its noun; `many` is the plural if not `one`s."""
    text = f"{number:,.0f}"
    return f"{text} {one if text == '1' else many or f'{one}s'}"


def duration(seconds: float) -> str:
    """`1 hour 30 minutes`, `7 days`, `0.5 seconds`: a time in its units, without loss."""
    parts, rest = [], seconds
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(counted(count, unit))
    if rest or not parts:
        parts.append(f"{rest:g} second{'' if rest == 1 else 's'}")
    return " ".join(parts)


def rounded_up(number: float) -> int:
    """An estimated number, to two digits: 12,345 is 13,000."""
    digits = 10 ** max(0, len(str(int(number))) - 2)
    return int(-(-number // digits) * digits)
