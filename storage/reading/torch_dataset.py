"""A reader's batches as a torch dataset. torch is imported when a dataset is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from storage.experience.interfaces import InputReader


def to_torch_dataset(reader: InputReader) -> Any:
    """A torch IterableDataset over a reader's batches, as dicts of tensors.

    Use it with `DataLoader(dataset, batch_size=None, num_workers=0)`: the reader prefetches in its
    own thread. Worker processes, which have to be forked before the first batch, and the ranks of
    torch.distributed, if it is initialized, share the episodes: each row comes once. They all
    decode every shard, so that more of them read no faster. Needs the [train] extra.
    """
    from torch import distributed  # noqa: PLC0415  an optional extra
    from torch.utils.data import IterableDataset, get_worker_info  # noqa: PLC0415  an optional extra

    class Batches(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            ranked = distributed.is_available() and distributed.is_initialized()
            rank, ranks = (
                (distributed.get_rank(), distributed.get_world_size()) if ranked else (0, 1)
            )
            worker = get_worker_info()
            index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
            if ranks * workers > 1:
                reader.share(rank * workers + index, ranks * workers)
            return (batch.to_torch() for batch in reader)

    return Batches()
