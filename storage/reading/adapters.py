"""Converting decoded rows: to an `Episode`, to names instead of codes, to torch tensors.

torch is imported when a dataset is created.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from storage.experience.episode import Episode
from storage.experience.interfaces import InputReader
from storage.experience.sample_batch import EPISODE_ORDINAL, NEXT_OBS, OBS, SampleBatch, T
from storage.reading.loading import ENDED, EPISODE_COLUMNS, FINAL
from storage.spaces.descriptors import Discrete, Space
from storage.spaces.leaves import leaves


def with_names(rows: SampleBatch, spaces: tuple[Space, Space]) -> SampleBatch:
    """Replace codes by names, as object arrays, in columns whose space has names.

    `spaces`: (observation, action).
    """
    named = rows.select(list(rows))
    for space, prefixes in zip(spaces, ((OBS, NEXT_OBS), ("actions",)), strict=True):
        for leaf in leaves(space):
            if isinstance(leaf.space, Discrete) and leaf.space.names:
                for column in (leaf.column(prefix) for prefix in prefixes):
                    if column in named:
                        named[column] = leaf.space.named(named[column])
    return named


def episode_of(rows: SampleBatch, stream: str, names: frozenset[str]) -> Episode:
    """The episode of decoded rows of one stream, episode and agent, sorted by t.

    `names`: the columns that the episode gets.
    """
    first, last = rows.slice(0, 1), rows.slice(rows.count - 1, None)
    per_step = {
        name: column
        for name, column in rows.items()
        if name.partition(".")[0] in names and name not in EPISODE_COLUMNS
    }
    finals = {path: column[0] for path, column in last.leaves(NEXT_OBS).items()}
    ended = last[ENDED][0]
    t = rows[T]
    return Episode(
        episode_id=first["eps_id"][0],
        columns=per_step,
        final_obs=finals if last[FINAL][0] else None,
        ended=ended,
        policy_id=first["policy_id"][0],
        agent_id=first["agent_id"][0],
        training_enabled=bool(first["training_enabled"][0]),
        continues=first["continues"][0],
        tags=json.loads(first["tags"][0]),
        stream=stream,
        episode_ordinal=int(first[EPISODE_ORDINAL][0]),
        complete=ended is not None and bool(t[0] == 0 and t[-1] == len(t) - 1),
    )


def to_torch_dataset(reader: InputReader, *, rank: tuple[int, int] | None = None) -> Any:
    """A torch IterableDataset over a reader's batches, as dicts of tensors.

    Use it with `DataLoader(dataset, batch_size=None, num_workers=0)`: the reader prefetches in its
    own thread. Worker processes and ranks share the episodes, so that each row comes once; workers
    have to be started before the first batch. All of them decode every shard, so more workers do
    not read faster. `rank`: (index of this process, number of processes), by default those of
    torch.distributed if it is initialized when reading begins. Needs the [train] extra.
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

        def __reduce__(self) -> tuple[Any, ...]:  # a spawned worker does not know the ranks
            return partial(to_torch_dataset, rank=place()), (reader,)

    return Batches()
