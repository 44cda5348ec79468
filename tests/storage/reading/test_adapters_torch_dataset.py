"""Worker processes and ranks share the rows of a reader."""

from __future__ import annotations

import copy
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.experience.interfaces import EndOfInput, InputReader, ReaderError
from storage.experience.sample_batch import SampleBatch
from storage.reading.adapters import to_torch_dataset
from storage.reading.shard_reader import ShardReader
from tests.storage.reading.test_shard_reader import part, write

PARTS = 24
ROWS = sorted((ordinal, t) for ordinal in range(PARTS) for t in range(3))


def fill(root: Path) -> None:
    for first in range(0, PARTS, 5):
        write(root, [part(i, 3) for i in range(first, min(first + 5, PARTS))])


def loaded(root: Path, workers: int) -> list[tuple[int, int]]:
    with ShardReader(root, columns=["rewards"], batch_size=4) as reader:
        loader = torch.utils.data.DataLoader(
            Numbers(reader),
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        return [tuple(row) for batch in loader for row in batch]


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """(ordinal, t) of each row: the stream's name is no tensor."""

    def __init__(self, reader: ShardReader) -> None:
        self._dataset = to_torch_dataset(reader)

    def __iter__(self) -> Any:
        for batch in self._dataset:
            yield torch.stack((batch["ordinal"], batch["t"]), dim=1).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_loader_bring_each_row_once(tmp_path: Path, workers: int) -> None:
    """Two workers return each row once, not twice."""
    fill(tmp_path)
    assert sorted(loaded(tmp_path, workers)) == ROWS


def test_what_is_sent_to_a_spawned_worker_goes_on_from_the_position(tmp_path: Path) -> None:
    """A copy, as made for a spawned worker, has the reader's settings and share, and begins at its
    position."""
    fill(tmp_path)
    with ShardReader(tmp_path, columns=["rewards"], batch_size=4, shuffle=8, seed=3) as reader:
        reader.share(1, 2)
        dataset = to_torch_dataset(reader, rank=(0, 1))
        with copy.copy(reader) as sent:
            expected = [b["rewards"].tolist() for b in copy.deepcopy(dataset)]
            assert [batch["rewards"].tolist() for batch in sent] == expected
        assert 0 < len(expected) < len(ROWS)
        assert reader.next().count == 4
        with copy.copy(reader) as sent:
            assert [b["rewards"].tolist() for b in sent] == [b["rewards"].tolist() for b in reader]


def rank(number: int, ranks: int, folder: str, found: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=ranks
    )
    found.put(loaded(Path(folder), 2))
    torch.distributed.destroy_process_group()


def test_ranks_and_their_workers_bring_each_row_once(tmp_path: Path) -> None:
    """Two ranks with two workers each: four shares."""
    fill(tmp_path)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    ranks = [context.Process(target=rank, args=(i, 2, str(tmp_path), found)) for i in range(2)]
    for process in ranks:
        process.start()
    shares = [found.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join(60)
    assert sorted(row for share in shares for row in share) == ROWS
    assert all(shares)


def test_a_reader_that_has_read_is_not_for_a_fork(tmp_path: Path) -> None:
    """A reader that has started its thread raises in a forked child, where it would wait for
    ever."""
    fill(tmp_path)
    with ShardReader(tmp_path, batch_size=4) as reader:
        reader.next()
        child = os.fork()
        if not child:
            try:
                reader.next()
            except ReaderError as error:
                os._exit(7 if "make a new one" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_input_that_cannot_be_shared_says_so() -> None:
    """An input that cannot be shared raises when several workers read it; one reader is
    accepted."""

    class Numbered(InputReader):
        def next(self, timeout: float | None = None) -> SampleBatch:
            raise EndOfInput("nothing")

    reader = Numbered()
    reader.share(0, 1)
    with pytest.raises(ReaderError, match="Numbered: expected one reader of this input, got 2"):
        reader.share(0, 2)
