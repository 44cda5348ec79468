"""The journal: the durable log of what was accepted, until shards hold it.

Knows SQLite, files, and sets of numbers (`experience.range_set`); nothing of what the bytes of its
records mean.
"""

__all__ = ["database", "memory_journal", "records", "sqlite_journal"]
