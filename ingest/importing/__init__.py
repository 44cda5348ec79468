"""Import of other systems' logs: read as columns, sent to a collector as whole episodes.

A client of the bulk route: it uses the transport of `ingest.delivery` and imports nothing of the
collector. pyarrow reads the files; Python code runs only for invalid rows.
`categories` is separate because it reads a whole source and keeps a file, before `values` converts
single columns. `formats` knows the files of other programs.
"""

__all__ = [
    "engine",
    "grouping",
    "importing",
    "inference",
    "options",
    "readers",
    "report",
    "sources",
]
