"""Shards as streams of batches."""
