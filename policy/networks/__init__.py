"""Policies in torch: modules, action distributions, export.

The twins of `policy.inference`; tests hold the two to the same numbers. Knows torch, spaces and
inference; nothing of losses, batches or shards.
"""

__all__ = ["export", "policy"]
