"""Episodes from events: the state machine that accepts or refuses events and seals parts.

It does no input or output, and takes the time as an argument. The state changes only through
journal events, so that replaying the journal gives the same state. It imports neither HTTP nor the
journal's file nor shards. Only `assembler` changes the state; `judge` and `status` read it.
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
