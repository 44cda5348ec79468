"""Times of command lines as microseconds since the epoch, and periods between two of them."""

from __future__ import annotations

from datetime import UTC, datetime


def parse_moment(option: str, text: str) -> int:
    """A time of ISO 8601, without a zone in UTC, as microseconds. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{option}: expected a date of ISO 8601, got {text!r:.80}") from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1_000_000)


def require_period(since: int | str | None, until: int | None) -> None:
    """Raise ValueError for an end that is not after the start."""
    if isinstance(since, int) and until is not None and since >= until:
        first, last = (datetime.fromtimestamp(one / 1e6, UTC) for one in (since, until))
        raise ValueError(f"--until: expected a time after --since {first}, got {last}")
