"""The bulk route: one request with an Arrow stream of whole episodes.

Imports the collector, which journals the accepted steps. Loads Arrow at the first request.
`repeats` is separate so that the rules for recognising a retried request stand in one place.
"""

__all__ = ["handler"]
