"""Published weights: candidates, immutable versions, the pointer to what is live.

Knows files, and of experience the ranges of rows that a lineage claims; takes arrays by name, and
knows nothing of what a network is.
"""

__all__ = ["files", "lease", "lineage", "manifest", "memory_store", "off_chain", "served", "store"]
