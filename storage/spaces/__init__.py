"""Spaces and their values: descriptors, canonical bytes, validation, action masks, candidates.

Imports only numpy, except `gymnasium_spaces`, which needs gymnasium.
"""

__all__ = [
    "action_mask",
    "candidates",
    "codec",
    "descriptors",
    "gymnasium_spaces",
    "leaves",
    "named_features",
]
