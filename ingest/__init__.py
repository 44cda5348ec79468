"""The edge: everything that a client touches. Knows storage, and policy through two doors.

Names are loaded when they are first used (PEP 562), so that a client loads no server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.client.policy_client import PolicyClient as PolicyClient
    from ingest.embedded.external_env import ExternalEnv as ExternalEnv
    from ingest.embedded.external_multi_agent_env import (
        ExternalMultiAgentEnv as ExternalMultiAgentEnv,
    )
    from ingest.embedded.policy_server_input import PolicyServerInput as PolicyServerInput

_ROOMS = {
    "ExternalEnv": "ingest.embedded.external_env",
    "ExternalMultiAgentEnv": "ingest.embedded.external_multi_agent_env",
    "PolicyClient": "ingest.client.policy_client",
    "PolicyServerInput": "ingest.embedded.policy_server_input",
}
__all__ = sorted(_ROOMS)
__headrace__ = True


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'ingest' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
