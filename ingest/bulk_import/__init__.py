"""The bulk route: one request with an Arrow stream of whole episodes.

It imports the collector, which journals the accepted steps, and loads Arrow at the first request.
`repeats` is separate so that the rules for recognising a retried request stand in one place.
"""

__all__ = ["handler"]
