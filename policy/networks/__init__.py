"""Policies in torch: modules, action distributions, export.

The twins of `policy.inference`; tests hold the two to the same numbers.
"""

__all__ = ["export", "policy"]
