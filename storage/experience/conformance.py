"""What every `InputReader` has to pass: a reader of one's own inherits the suite.

class TestMyReader(InputReaderConformance):
    def reader(self) -> InputReader: ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from storage.conformance import expect, expect_error
from storage.experience.interfaces import EndOfInput, InputReader, ReaderError
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch


class InputReaderConformance:
    """Checks of the promises of `InputReader`; each raises ConformanceError.

    Each call of `reader` gives a new reader of the same input: at least two batches, of SampleBatch
    or MultiAgentBatch.
    """

    ends: ClassVar[bool] = True
    """False for an input without an end, such as a sampler."""

    def reader(self) -> InputReader:
        """A new reader of the input."""
        raise NotImplementedError

    def idle(self) -> InputReader | None:
        """A reader of a growing input that has nothing yet; None if this kind has no such input."""
        return None

    def test_batches_have_rows_until_the_end(self) -> None:
        """The end is EndOfInput, each time."""
        with self.reader() as reader:
            for batch in self._batches(reader):
                expect("a batch has rows", batch.count > 0)
            if self.ends:
                expect_error("the end is EndOfInput", EndOfInput, reader.next)
                expect_error("the end stays the end", EndOfInput, reader.next)

    def test_batches_have_the_same_columns(self) -> None:
        """Of each policy."""
        columns: dict[str, set[str]] = {}
        with self.reader() as reader:
            for policy_id, rows in _tables(self._batches(reader)):
                known = columns.setdefault(policy_id, set(rows))
                expect("batches have the same columns", set(rows), known)

    def test_a_batch_belongs_to_the_caller(self) -> None:
        """The next one does not change it, and shares only memory that nobody can write to."""
        with self.reader() as reader:
            first = reader.next()
            before = _rows([first])
            tables = dict(_tables([first]))
            for policy_id, later in _tables([reader.next()]):
                for name, column in tables.get(policy_id, {}).items():
                    shared = column.flags.writeable and np.shares_memory(column, later[name])
                    expect(f"two batches share no memory in {name!r}", shared, False)
            expect("a batch stays as it was", _rows([first]), before)

    def test_wanted_columns_are_added(self) -> None:
        """`want` takes no column away."""
        with self.reader() as reader:
            usual = dict(_tables([reader.next()]))
        with self.reader() as reader:
            reader.want(sorted(set.intersection(*map(set, usual.values())))[:1])
            for policy_id, rows in _tables([reader.next()]):
                missing = set(usual.get(policy_id, ())) - set(rows)
                expect("the usual columns are still there", missing, set())

    def test_readers_share_each_row_once(self) -> None:
        """Or raise ReaderError, as every reader does that cannot share its input."""
        with self.reader() as alone, self.reader() as first, self.reader() as second:
            alone.share(0, 1)
            try:
                first.share(0, 2)
                second.share(1, 2)
            except ReaderError:
                return
            if self.ends:
                together = [*self._batches(first), *self._batches(second)]
                whole = _rows(self._batches(alone))
                expect("two readers return each row once", _rows(together), whole)

    def test_a_wait_ends_with_an_empty_batch(self) -> None:
        """Only of an input that grows."""
        reader = self.idle()
        if reader is not None:
            with reader:
                expect("after the timeout comes no row", reader.next(timeout=0.01).count, 0)

    def test_closing_twice_is_fine(self) -> None:
        """Before the end of the input, too."""
        reader = self.reader()
        reader.next()
        reader.close()
        reader.close()

    def _batches(self, reader: InputReader) -> list[Any]:
        return list(reader) if self.ends else [reader.next() for _ in range(3)]


def _tables(batches: Iterable[SampleBatch | MultiAgentBatch]) -> list[tuple[str, SampleBatch]]:
    """(policy id, its rows) of each batch."""
    found: list[tuple[str, SampleBatch]] = []
    for batch in batches:
        if isinstance(batch, MultiAgentBatch):
            found += batch.policy_batches.items()
        else:
            found.append(("", batch))
    return found


def _rows(batches: Iterable[SampleBatch | MultiAgentBatch]) -> Counter[str]:
    """How often each row occurs, as text."""
    tables = _tables(batches)
    return Counter(
        repr((policy_id, sorted((name, np.asarray(x).tolist()) for name, x in row.items())))
        for policy_id, rows in tables
        for row in rows.rows()
    )
