"""Episodes from events: the state machine that decides what is accepted, and what becomes a part.

Pure, as `ingest.protocol` is: it changes only through journal events, so that a replay of the
journal ends in the same state. Knows nothing of HTTP, of the journal's file or of shards.
`assembler` has the state and is all that changes it; `judge` and `status` read it.
"""

__all__ = [
    "assembler",
    "client_instances",
    "event_checks",
    "idempotency",
    "journal_events",
    "judge",
    "open_episode",
    "policy_rules",
    "redaction",
    "sealed_parts",
    "status",
]
