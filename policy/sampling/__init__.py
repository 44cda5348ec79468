"""Batches from environments."""
