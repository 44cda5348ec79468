"""Policies: acting, training, off-policy evaluation, and the jobs around them.

Imports storage, not ingest. Users import from `headrace`; the other packages import by full module
name.
"""
