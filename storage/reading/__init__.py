"""Shards as streams of batches: finding, verifying, decoding, joining, shuffling.

Records delivered parts by stream and ordinal, so that every row is delivered once. Imports shards,
declarations and experience, but no journal, weights or learner.
"""

__all__ = [
    "adapters",
    "batching",
    "conformance",
    "exclusion",
    "holdout",
    "ledger",
    "listing",
    "live_source",
    "loading",
    "multi_agent_reader",
    "objects_source",
    "position",
    "retries",
    "shard_reader",
    "sources",
    "untrained_rows",
]
