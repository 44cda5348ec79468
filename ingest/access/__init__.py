"""Access control: tokens and their rates, logins of browsers, key files, admission of requests.

Imports the protocol's errors, declarations (which fields are hashed) and file functions; nothing of
episodes or routes.
"""

__all__ = ["admission", "key_files", "log_rate", "tokens"]
