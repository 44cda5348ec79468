"""HTTP below the routes: bodies, connections, and their limits.

Knows the protocol and access; nothing of what a request means.
"""

__all__ = ["asgi", "connections", "cost_limits", "limits"]
