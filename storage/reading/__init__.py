"""Shards as streams of batches: finding, verifying, decoding, joining, shuffling.

Counts what it delivered by stream and ordinal, so that every row is delivered once.
"""

__all__ = [
    "ledger",
    "live_source",
    "loading",
    "multi_agent_reader",
    "shard_reader",
    "sources",
    "stages",
]
