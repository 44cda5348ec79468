"""Experience in memory: steps, parts, episodes, sample batches, interfaces of readers and writers.

Pure: no clock, no thread, no file. Knows spaces alone.
"""

__all__ = ["episode", "interfaces", "multi_agent_batch", "range_set", "sample_batch", "sequences"]
