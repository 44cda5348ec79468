"""Spaces and their values: descriptors, canonical bytes, validation.

Imports only numpy, except `gymnasium_spaces`, which needs gymnasium.
"""

__all__ = ["codec", "descriptors", "gymnasium_spaces", "leaves"]
