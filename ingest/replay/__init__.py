"""Logs in files, read row by row and sent through a collector as episodes.

A client like any other: it knows `ingest.client`, not the collector.
"""

__all__ = ["replay"]
