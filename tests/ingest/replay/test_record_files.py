"""Files as records: any cell comes back as it was written, with the line where it stands."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ingest.replay.record_files import open_table

CELL = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=8)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=8))
def test_csv_cells_and_lines_are_those_of_the_file(rows: list[tuple[str, str]]) -> None:
    """For any text: what was written is read, and a row's line is where it begins."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    lines = []
    for row in [("a", "b"), *rows]:
        lines.append(text.getvalue().count("\n") + 1)
        writer.writerow(row)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.csv")
        path.write_bytes(text.getvalue().encode())
        found = list(open_table(path).records(["b", "a"]))
    assert [tuple(record.cells) for record in found] == [(b or None, a or None) for a, b in rows]
    assert [record.line for record in found] == lines[1:]
    assert [record.number for record in found] == list(range(1, len(rows) + 1))
