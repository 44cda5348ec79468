"""Our readers keep the promises of `InputReader`, and breaks are found.

Those of a worker and of a collector in the trainer's process are in their own tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from storage.conformance import ConformanceError
from storage.experience.conformance import InputReaderConformance
from storage.experience.interfaces import EndOfInput, InputReader
from storage.experience.sample_batch import SampleBatch
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from tests.storage.multi_agent_log import JointLog, Run
from tests.storage.reading.test_shard_reader import part, write


class TestTransitions(InputReaderConformance):
    mode = "transitions"

    @pytest.fixture(autouse=True)
    def _logged(self, tmp_path: Path) -> None:
        self.root, self.empty = tmp_path / "log", tmp_path / "empty"
        for first in (0, 4):
            write(self.root, [part(first + i, 3) for i in range(4)])

    def reader(self) -> InputReader:
        return ShardReader(self.root, mode=self.mode, batch_size=6)

    def idle(self) -> InputReader:
        return ShardReader(self.empty, mode=self.mode, follow=True, poll_interval=0.01)


class TestFragments(TestTransitions):
    mode = "fragments"


class TestEpisodes(TestTransitions):
    mode = "episodes"


class TestJointEpisodes(InputReaderConformance):
    @pytest.fixture(autouse=True)
    def _logged(self, tmp_path: Path) -> None:
        self.root = tmp_path
        log = JointLog(tmp_path)
        for name in ("e", "f", "g"):
            log.write(
                Run(name, "s", "seller", (0, 1, 2, 3), agents=2),
                Run(name, "b", "buyer", (2, 3), "truncated", agents=2),
            )

    def reader(self) -> InputReader:
        return MultiAgentReader(self.root, batch_size=4)

    def idle(self) -> InputReader:
        return MultiAgentReader(self.root, batch_size=100, follow=True, poll_interval=0.01)


# --- broken readers, each by the check that finds it ----------------------------------------------


class Counting(InputReader):
    """Three batches of two rows."""

    def __init__(self) -> None:
        self.left = [self.batch(2 * i) for i in range(3)]

    def batch(self, first: int) -> SampleBatch:
        return SampleBatch(obs=np.arange(first, first + 2), rewards=np.ones(2))

    def next(self, timeout: float | None = None) -> SampleBatch:
        if not self.left:
            raise EndOfInput("no more")
        return self.left.pop(0)


class Quiet(Counting):
    """Says the end by a batch without rows, once."""

    def next(self, timeout: float | None = None) -> SampleBatch:
        batch = super().next()
        if batch.count and not self.left:
            self.left = [batch.slice(0, 0)]
        return batch


class Looping(Counting):
    """Begins again after the end."""

    def next(self, timeout: float | None = None) -> SampleBatch:
        try:
            return super().next()
        except EndOfInput:
            self.left = [self.batch(0)]
            raise


class Uneven(Counting):
    def batch(self, first: int) -> SampleBatch:
        found = super().batch(first)
        return found.select(["obs"]) if first else found


class Buffered(Counting):
    """Fills one buffer again and again."""

    buffer = np.zeros(2)

    def next(self, timeout: float | None = None) -> SampleBatch:
        self.buffer[:] = super().next()["obs"]
        return SampleBatch(obs=self.buffer, rewards=np.ones(2))


class Narrowing(Counting):
    """Returns the wanted columns alone."""

    wanted: Sequence[str] = ("obs", "rewards")

    def want(self, columns: Sequence[str]) -> None:
        self.wanted = columns

    def next(self, timeout: float | None = None) -> SampleBatch:
        return super().next().select(self.wanted)


class Generous(Counting):
    """Gives every row to every reader."""

    def share(self, index: int, count: int) -> None: ...


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Quiet, "batches_have_rows_until_the_end"),
        (Looping, "batches_have_rows_until_the_end"),
        (Uneven, "batches_have_the_same_columns"),
        (Buffered, "a_batch_belongs_to_the_caller"),
        (Narrowing, "wanted_columns_are_added"),
        (Generous, "readers_share_each_row_once"),
    ],
)
def test_the_suite_finds_what_is_broken(broken: type[Counting], check: str) -> None:
    class Suite(InputReaderConformance):
        def reader(self) -> InputReader:
            return broken()

    with pytest.raises(ConformanceError):
        getattr(Suite(), f"test_{check}")()


class TestCounting(InputReaderConformance):
    """The base of the broken ones keeps every promise."""

    def reader(self) -> InputReader:
        return Counting()
