"""Who may call, and how often: tokens, key files, admission of a request.

Knows the protocol's errors, what a declaration redacts, and files for keys and tokens; nothing of
episodes or routes.
"""

__all__ = ["admission", "key_files", "log_rate", "tokens"]
