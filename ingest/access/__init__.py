"""Who may do what: tokens, key files, admission."""
