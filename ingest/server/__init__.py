"""Routes, metrics, logs and the process that serves."""
