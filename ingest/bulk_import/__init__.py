"""Many steps in one request: an Arrow stream becomes whole episodes.

Knows the collector, which journals what is accepted here. Loads Arrow at the first request.
`repeats` is apart because what makes a request a retry has to be read in one place.
"""

__all__ = ["handler"]
