"""Torch modules, distributions, export."""
