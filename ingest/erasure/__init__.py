"""Erasing episodes from a collector's journal, in its process or without one.

`journal` is what the collector does, and loads no Arrow. `command` asks a running collector for it,
or does it alone. May import the collector and `ingest.verification`.
"""

__all__ = ["command", "journal"]
