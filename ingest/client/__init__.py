"""The client library: logging calls, the queue and its delivery, local and remote actions.

What a service loads that logs episodes: numpy, msgspec and urllib3, nothing heavier; calls outside
the hot path go by requests, which only they load. Knows the protocol, spaces, declarations, and for
local actions `policy.inference` and published weights; for a spool the locks of `storage.system`;
OpenTelemetry's API, where that is installed. Nothing of the collector. `batch_size` is apart from
the queue: it learns how much a body may hold, and knows no events.
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
