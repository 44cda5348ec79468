"""Spaces, their values and the codec."""
