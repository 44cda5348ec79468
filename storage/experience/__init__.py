"""Experience in memory: steps, parts, episodes, sample batches, interfaces of readers and writers.

Pure: no clock, no thread, no file. Knows numpy, msgspec and our errors; of Arrow, pandas
and torch what it makes of columns, each only where it is installed. `tables` is apart because it
alone speaks Arrow and pandas.
"""

__all__ = [
    "episode",
    "hashed",
    "interfaces",
    "multi_agent_batch",
    "range_set",
    "sample_batch",
    "sequences",
]
