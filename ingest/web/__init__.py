"""HTTP below the routes: bodies, connections, and their limits.

Imports the protocol and `ingest.access`; nothing of the content of requests.
"""

__all__ = ["asgi", "connections", "cost_limits", "limits"]
