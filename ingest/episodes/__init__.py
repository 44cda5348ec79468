"""Episodes from events: the state machine that decides what is accepted, and what becomes a part.

Pure, as `ingest.protocol` is: it changes only through journal events, so that a replay of the
journal ends in the same state. Knows nothing of HTTP, of the journal's file or of shards.
`status` is apart because it only reads.
"""

__all__ = [
    "assembler",
    "client_instances",
    "event_checks",
    "idempotency",
    "journal_events",
    "open_episode",
    "redaction",
    "sealed_parts",
    "status",
]
