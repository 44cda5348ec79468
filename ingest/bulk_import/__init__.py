"""Many steps in one request: an Arrow stream becomes whole episodes.

Knows the collector, which journals what is accepted here. Loads Arrow at the first request.
"""

__all__ = ["handler"]
