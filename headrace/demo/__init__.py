"""`headrace demo`: from a real log to a published policy, and clients that learn as they act.

It runs the commands as a user would. It imports declarations, the client, the shard reader and
`headrace.output`.
"""

__all__ = ["run", "stage"]
