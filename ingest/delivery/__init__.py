"""How a client's events reach the collector: the queue, its spool, the thread that sends.

`outbox` takes events from the calls, `sender` delivers them by `transport`, and `results` applies
what the collector answers. Services that log episodes load these modules, so they need only numpy,
msgspec and urllib3. Imports the protocol, spaces, declarations and the types of experience, and the
file locks of `storage.system` for a spool; OpenTelemetry's API if it is installed. Imports none of
the calls of `ingest.client`. `dropped` is apart because it counts what never enters the queue.
"""

__all__ = [
    "client_stats",
    "declarations",
    "events",
    "outbox",
    "results",
    "sender",
    "spool",
    "traces",
    "transport",
    "unconfirmed",
]
