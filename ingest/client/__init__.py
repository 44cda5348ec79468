"""The client library: the calls that log episodes, local and remote actions, publishing.

Services that log episodes load it, so it needs only numpy and msgspec, and urllib3 for the
delivery; calls outside the hot path use requests, which is imported at the first such call. Imports
`ingest.delivery`, the protocol, declarations, the types of experience and `storage.system`, which
notices forks; `policy.inference`, published weights and their errors for local actions. Imports
nothing of the collector.
"""

__all__ = [
    "admin_session",
    "arguments",
    "async_client",
    "episode_calls",
    "open_episodes",
    "policy_client",
    "publisher",
]
