"""`headrace demo`: from a real log to a published policy, and clients that learn as they act.

Uses the commands as a user would.
"""

__all__ = ["run"]
