"""Policies in torch: modules, action distributions, export.

The torch counterparts of `policy.inference`; tests check that both give the same numbers. Imports
torch, spaces and inference, but no losses; `own_modules` reads observations of a log.
"""

__all__ = ["distributions", "export", "modules", "own_modules", "policy"]
