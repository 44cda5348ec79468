"""The rows that weights were not trained on, where a reader is ahead of them."""

from __future__ import annotations

from storage.reading.untrained_rows import NOTHING_HELD, UntrainedRows


def test_rows_that_were_delivered_between_held_ones_are_untrained() -> None:
    """A shuffled window may hold any rows of a part whose others went into lost weights."""
    position = {**NOTHING_HELD, "streams": ["s"], "window": [[0, 7, 1, 1], [0, 7, 4, 1]]}
    assert UntrainedRows.behind({}, {}, position).to_json() == {"s": [[7, 0, 1], [7, 2, 2]]}
