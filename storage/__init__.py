"""What experience is, in hand and at rest. Knows nobody.

Names are loaded when they are first used (PEP 562), so that a service that only logs never pays
for pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.arrow_columns import decode_column as decode_column
    from storage.episode import Episode as Episode
    from storage.input_reader import InputReader as InputReader
    from storage.input_reader import OutputWriter as OutputWriter
    from storage.multi_agent_batch import MultiAgentBatch as MultiAgentBatch
    from storage.multi_agent_reader import MultiAgentReader as MultiAgentReader
    from storage.parquet_output import ParquetOutputWriter as ParquetOutputWriter
    from storage.reader import ShardReader as ShardReader
    from storage.sample_batch import SampleBatch as SampleBatch
    from storage.shards import ShardWriter as ShardWriter
    from storage.shards import read_shard as read_shard
    from storage.shards import to_pandas as to_pandas
    from storage.weights import WeightStore as WeightStore

_ROOMS = {
    "Episode": "storage.episode",
    "InputReader": "storage.input_reader",
    "MultiAgentBatch": "storage.multi_agent_batch",
    "MultiAgentReader": "storage.multi_agent_reader",
    "OutputWriter": "storage.input_reader",
    "ParquetOutputWriter": "storage.parquet_output",
    "SampleBatch": "storage.sample_batch",
    "ShardReader": "storage.reader",
    "ShardWriter": "storage.shards",
    "WeightStore": "storage.weights",
    "decode_column": "storage.arrow_columns",
    "read_shard": "storage.shards",
    "to_pandas": "storage.shards",
}
__all__ = sorted(_ROOMS)
__headrace__ = True


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
