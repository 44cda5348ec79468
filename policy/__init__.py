"""What acts, what learns, what judges.

Knows storage, not ingest. Users import from `headrace`; other packages by full module name.
"""
