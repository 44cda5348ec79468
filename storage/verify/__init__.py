"""Checks of what is at rest: is every acknowledged step in exactly one place?

Reads shards and journals, and changes nothing.
"""

__all__ = ["audit", "inventory", "second_reader", "second_reader_main"]
