"""The journal: the durable log of what was accepted, until shards hold it.

Knows files; nothing of what its records mean.
"""

__all__ = ["database", "journal_damage", "memory_journal", "records", "sqlite_journal"]
