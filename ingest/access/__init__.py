"""Who may call, and how often: tokens, key files, admission of a request.

Knows the protocol; nothing of episodes or routes.
"""

__all__ = ["admission", "key_files", "log_rate", "redaction_key", "tokens"]
