"""Experience in memory: steps, parts, episodes, sample batches, interfaces of readers and writers.

No clocks, threads or files. Imports numpy, msgspec, `storage.conformance` and
`storage.errors`. Conversions to Arrow, pandas and torch import these libraries when they are
called. `tables` is separate because only it uses Arrow and pandas.
"""

__all__ = [
    "conformance",
    "endings",
    "episode",
    "hashed",
    "interfaces",
    "multi_agent_batch",
    "part_columns",
    "range_set",
    "reward_history",
    "sample_batch",
    "sequences",
    "step_columns",
]
