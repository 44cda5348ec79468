"""The write-ahead journal."""
