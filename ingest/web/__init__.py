"""Requests and connections, and their limits."""
