"""Many steps in one request."""
