"""Episodes and batches in memory: pure."""
