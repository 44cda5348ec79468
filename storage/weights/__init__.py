"""Published weights: candidates, immutable versions, the pointer to what is live.

Knows files and errors; nothing of what a network is.
"""

__all__ = ["chain", "files", "lease", "lineage", "manifest", "memory_store", "served", "store"]
