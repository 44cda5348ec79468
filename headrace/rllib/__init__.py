"""Ray's RLlib learns from what Headrace keeps. Needs the [rllib] extra, in an environment with Ray.

`HeadraceEnvRunner`, in `runner`, samples what clients did and publishes what is learned; `weights`
turns an RLModule into a policy that clients act with. `RootData`, in `offline`, is the data of an
offline algorithm. Both are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from headrace.rllib.offline import RootData as RootData
    from headrace.rllib.runner import HeadraceEnvRunner as HeadraceEnvRunner

__all__: list[str] = []

_HOMES = {"HeadraceEnvRunner": "runner", "RootData": "offline"}
_OLDEST = (2, 60)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.rllib' has no attribute {name!r}")
    if tuple(map(int, ray.__version__.split(".")[:2])) < _OLDEST:
        raise ImportError(f"headrace.rllib: expected Ray 2.60 or later, got {ray.__version__}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
