"""The bulk route: one request with an Arrow stream of whole episodes.

It imports the collector, which journals the accepted steps, and loads Arrow at the first request.
`repeats` is separate so that the rules for recognising a retried request stand in one place, `runs`
so that they are tested without the other columns, and `import_reply` because it only counts:
`step_columns`, which `acceptance` imports, uses its limit.
"""

__all__ = ["handler"]
