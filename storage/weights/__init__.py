"""Published weights: candidates, immutable versions, the pointer to what is live.

Knows files and errors; nothing of what a network is.
"""

__all__ = ["lease", "lineage", "manifest", "memory_store", "store"]
