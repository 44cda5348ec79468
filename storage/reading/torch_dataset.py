"""A reader's batches as a torch dataset. torch is imported when a dataset is made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from storage.experience.interfaces import InputReader


def to_torch_dataset(reader: InputReader, *, rank: tuple[int, int] | None = None) -> Any:
    """A torch IterableDataset over a reader's batches, as dicts of tensors.

    Use it with `DataLoader(dataset, batch_size=None, num_workers=0)`: the reader prefetches in its
    own thread. Worker processes, which have to be started before the first batch, and ranks share
    the episodes: each row comes once. They all decode every shard, so that more of them read no
    faster. `rank`: (this process's, how many), by default those of torch.distributed if it is
    initialized when reading begins. Needs the [train] extra.
    """
    from torch import distributed  # noqa: PLC0415  an optional extra
    from torch.utils.data import IterableDataset, get_worker_info  # noqa: PLC0415  an optional extra

    def place() -> tuple[int, int]:
        if rank is not None:
            return rank
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1

    class Batches(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            number, ranks = place()
            worker = get_worker_info()
            index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
            if ranks * workers > 1:
                reader.share(number * workers + index, ranks * workers)
            return (batch.to_torch() for batch in reader)

        def __reduce__(self) -> tuple[Any, ...]:  # a spawned worker knows of no ranks
            return partial(to_torch_dataset, rank=place()), (reader,)

    return Batches()
