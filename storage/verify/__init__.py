"""Checks of what is on disk."""
