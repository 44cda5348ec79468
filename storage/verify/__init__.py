"""Checks of the files under a root: is every acknowledged step in exactly one place?

Reads shards, journals and weights, and changes nothing by itself. `verify --quarantine` moves
damaged shards to another folder, with a note of their digests. `quarantine` is a module of its own
because only it writes.
"""

__all__ = [
    "audit",
    "inventory",
    "quarantine",
    "second_reader",
    "second_reader_main",
    "shard_check",
]
