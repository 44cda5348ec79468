"""The rows that a saved position holds, as runs."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from storage.reading.ledger import decode_runs, encode_runs

ROW = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 3))


@given(st.lists(ROW, max_size=8))
@example([(0, 0, 0), (1, 0, 1)])
@example([(0, 0, 0), (0, 1, 1)])
def test_runs_name_the_same_rows_in_the_same_order(rows: list[tuple[int, int, int]]) -> None:
    """(stream, ordinal, row within the part): a shuffled window holds any rows in any order."""
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    runs = decode_runs(encode_runs(*columns), 2)
    assert rows == [(s, o, row + i) for s, o, row, count in runs.tolist() for i in range(count)]
