"""HTTP below the routes: bodies, connections, and their limits.

It imports the protocol and `ingest.access`, and knows nothing of the content of requests.
"""

__all__ = ["asgi", "connections", "cost_limits", "limits"]
