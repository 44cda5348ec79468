"""`headrace demo`: from a real log to a published policy, and clients that learn as they act.

Runs the commands as a user would. Knows declarations, the client, the shard reader and the output,
no other insides.
"""

__all__ = ["run"]
