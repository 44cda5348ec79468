"""A reader's batches as a torch dataset. torch is imported when a dataset is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from storage.experience.interfaces import InputReader


def to_torch_dataset(reader: InputReader) -> Any:
    """A torch IterableDataset over a reader's batches, as dicts of tensors.

    Use it with `DataLoader(dataset, batch_size=None, num_workers=0)`: the reader prefetches in its
    own thread, and worker processes would each read everything. Needs the [train] extra.
    """
    from torch.utils.data import IterableDataset  # noqa: PLC0415  an optional extra

    class Batches(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return (batch.to_torch() for batch in reader)

    return Batches()
