"""Episodes from events: the state machine that accepts or refuses events and seals parts.

No input or output; the time is an argument. The state changes only through journal events, so a
replay of the journal ends in the same state. Imports nothing of HTTP, of the journal's file or of
shards. Only `assembler` changes the state; `judge` and `status` read it.
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
