"""Checks of what is at rest: is every acknowledged step in exactly one place?

Reads shards, journals and weights, and changes nothing unless asked: `verify --quarantine` sets
damaged shards aside, with a note of their digests: `quarantine` is apart because nothing else here
writes.
"""

__all__ = ["audit", "inventory", "second_reader", "second_reader_main"]
