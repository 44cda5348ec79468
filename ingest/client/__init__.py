"""The client library: logging calls, the queue and its delivery, local and remote actions.

What a service loads that logs episodes: numpy, msgspec and urllib3, nothing heavier. Knows the
protocol, and nothing of the collector.
"""

__all__ = [
    "events",
    "import_client",
    "multi_agent",
    "open_episodes",
    "policy_client",
    "publisher",
    "transport",
]
