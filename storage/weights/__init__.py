"""Published weights."""
