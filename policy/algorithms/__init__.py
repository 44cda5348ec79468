"""One readable file an algorithm: its config, its loss, its update."""
