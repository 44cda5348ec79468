"""Spaces and their values: descriptors, canonical bytes, validation.

numpy alone, but for `gymnasium_spaces`, which needs gymnasium.
"""

__all__ = ["codec", "descriptors", "gymnasium_spaces", "leaves"]
