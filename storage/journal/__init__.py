"""The journal: the durable log of accepted events until they are in shards.

Imports SQLite, file functions and `experience.range_set`. The bytes of its rows are opaque to it.
"""

__all__ = ["copying", "database", "memory_journal", "records", "sqlite_journal"]
