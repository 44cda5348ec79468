"""What acts, what learns, what judges. Knows storage.

Names are loaded when they are first used (PEP 562), so that a client that acts with numpy never
pays for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policy.algorithms.trainable_policy import TrainablePolicy as TrainablePolicy
    from policy.envs.env_runner import EnvRunner as EnvRunner
    from policy.inference.spec import PolicySpec as PolicySpec
    from policy.networks.policy import Policy as Policy
    from policy.ope import estimators as estimators
    from policy.sampling.callbacks import Callbacks as Callbacks
    from policy.worker.group import WorkerGroup as WorkerGroup
    from policy.worker.rollout_worker import RolloutWorker as RolloutWorker

_ROOMS = {
    "Callbacks": "policy.sampling.callbacks",
    "EnvRunner": "policy.envs.env_runner",
    "Policy": "policy.networks.policy",
    "PolicySpec": "policy.inference.spec",
    "RolloutWorker": "policy.worker.rollout_worker",
    "TrainablePolicy": "policy.algorithms.trainable_policy",
    "WorkerGroup": "policy.worker.group",
    "estimators": "policy.ope.estimators",
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
