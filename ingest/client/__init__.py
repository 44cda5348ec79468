"""The client library: logging calls, the queue and its delivery, local and remote actions.

Services that log episodes load it, so it needs only numpy, msgspec and urllib3; calls outside the
hot path use requests, which is imported at the first such call. Imports the protocol, spaces and
declarations; `policy.inference` and published weights for local actions; the file locks of
`storage.system` for a spool; OpenTelemetry's API if it is installed. Imports nothing of the
collector. `dropped` is separate from the outbox because it neither queues nor waits.
"""

__all__ = [
    "admin_session",
    "async_client",
    "client_stats",
    "declarations",
    "events",
    "multi_agent",
    "open_episodes",
    "policy_client",
    "publisher",
    "transport",
]
