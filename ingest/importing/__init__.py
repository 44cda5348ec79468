"""Logs of other systems, read as columns and sent through a collector as whole episodes.

A client of the bulk route: it knows how `ingest.client` speaks HTTP, and nothing of the collector.
pyarrow does the reading; no Python runs per row, but for rows that are at fault.
"""

__all__ = ["importing", "inference", "options", "report"]
