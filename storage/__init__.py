"""What experience is, in hand and at rest. Knows nobody.

Names are loaded when they are first used (PEP 562), so that a service that only logs never pays
for pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.experience.episode import Episode as Episode
    from storage.experience.interfaces import InputReader as InputReader
    from storage.experience.interfaces import OutputWriter as OutputWriter
    from storage.experience.multi_agent_batch import MultiAgentBatch as MultiAgentBatch
    from storage.experience.sample_batch import SampleBatch as SampleBatch
    from storage.reading.multi_agent_reader import MultiAgentReader as MultiAgentReader
    from storage.reading.shard_reader import ShardReader as ShardReader
    from storage.shards.arrow_arrays import decode_column as decode_column
    from storage.shards.output_writer import ParquetOutputWriter as ParquetOutputWriter
    from storage.shards.shard import ShardWriter as ShardWriter
    from storage.shards.shard import read_shard as read_shard
    from storage.shards.shard import to_pandas as to_pandas
    from storage.weights.store import WeightStore as WeightStore

_ROOMS = {
    "Episode": "storage.experience.episode",
    "InputReader": "storage.experience.interfaces",
    "MultiAgentBatch": "storage.experience.multi_agent_batch",
    "MultiAgentReader": "storage.reading.multi_agent_reader",
    "OutputWriter": "storage.experience.interfaces",
    "ParquetOutputWriter": "storage.shards.output_writer",
    "SampleBatch": "storage.experience.sample_batch",
    "ShardReader": "storage.reading.shard_reader",
    "ShardWriter": "storage.shards.shard",
    "WeightStore": "storage.weights.store",
    "decode_column": "storage.shards.arrow_arrays",
    "read_shard": "storage.shards.shard",
    "to_pandas": "storage.shards.shard",
}
__all__ = sorted(_ROOMS)
__headrace__ = True


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
