"""Logs in files, sent as if they happened now."""
