"""`headrace demo`: from a real log to a published policy, and clients that learn as they act.

Runs the commands as a user would. Imports declarations, the client, the shard reader and
`headrace.output`.
"""

__all__ = ["run"]
