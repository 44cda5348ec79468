"""What acts, what learns, what judges. Knows storage.

Names are loaded when they are first used (PEP 562), so that a client that acts with numpy never
pays for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import storage

if not hasattr(storage, "__headrace__"):
    raise ImportError(
        f"policy needs Headrace's package 'storage', but Python found another one: "
        f"{storage.__file__}. Uninstall or rename it, or put Headrace before it on sys.path."
    )

if TYPE_CHECKING:
    from policy import estimators as estimators
    from policy.callbacks import Callbacks as Callbacks
    from policy.env_runner import EnvRunner as EnvRunner
    from policy.policy import Policy as Policy
    from policy.rollout_worker import RolloutWorker as RolloutWorker
    from policy.spec import PolicySpec as PolicySpec
    from policy.trainable_policy import TrainablePolicy as TrainablePolicy
    from policy.worker_group import WorkerGroup as WorkerGroup

_ROOMS = {
    "Callbacks": "policy.callbacks",
    "EnvRunner": "policy.env_runner",
    "Policy": "policy.policy",
    "PolicySpec": "policy.spec",
    "RolloutWorker": "policy.rollout_worker",
    "TrainablePolicy": "policy.trainable_policy",
    "WorkerGroup": "policy.worker_group",
    "estimators": "policy.estimators",
}
__all__ = sorted(_ROOMS)
__headrace__ = True


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'policy' has no attribute {name!r}")
    room = import_module(_ROOMS[name])
    return room if name == "estimators" else getattr(room, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
