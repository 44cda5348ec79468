"""The algorithms by name, as commands and settings files choose them.

algorithm("iql", tau=0.9)                # IQLConfig(tau=0.9)
algorithm("torchrl:sac", live=True)      # SACConfig()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.bc import BCConfig
from policy.algorithms.cql import CQLConfig
from policy.algorithms.dm import DMConfig
from policy.algorithms.iql import IQLConfig
from policy.algorithms.marwil import MARWILConfig
from policy.algorithms.ppo import PPOConfig
from policy.algorithms.settings import changed, near_names
from policy.algorithms.torchrl import (
    LOG_UPDATES,
    DQNConfig,
    REDQConfig,
    SACConfig,
    TD3BCConfig,
    TD3Config,
    TorchRLConfig,
)

_BORROWED: Mapping[str, type[TorchRLConfig]] = {
    "torchrl:dqn": DQNConfig,
    "torchrl:sac": SACConfig,
    "torchrl:td3": TD3Config,
    "torchrl:redq": REDQConfig,
}

FROM_LOGS: Mapping[str, AlgorithmConfig] = {
    "dr": BanditConfig(objective="dr"),
    "ips": BanditConfig(objective="ips"),
    "snips": BanditConfig(objective="snips"),
    "dm": DMConfig(),
    "bc": BCConfig(),
    "marwil": MARWILConfig(),
    "iql": IQLConfig(),
    "cql": CQLConfig(),
    **{name: config(updates=LOG_UPDATES) for name, config in _BORROWED.items()},
    "torchrl:td3bc": TD3BCConfig(updates=LOG_UPDATES),
}
"""Algorithms that learn from a log, with their default settings."""

LIVE: Mapping[str, AlgorithmConfig] = {
    "ppo": PPOConfig(),
    **{name: config() for name, config in _BORROWED.items()},
}
"""Algorithms that learn from live clients, with their default settings."""

ALGORITHMS: Mapping[str, AlgorithmConfig] = {**FROM_LOGS, **LIVE, **FROM_LOGS}


def algorithm(name: str, *, live: bool = False, **settings: Any) -> AlgorithmConfig:
    """The config of a named algorithm, with settings that replace its defaults.

    Defaults are those for a log if the algorithm learns from both, or with `live` for clients.

    Settings may be text, as on a command line. Raises ValueError for an unknown name or setting,
    with the names near it, and for a value out of range.
    """
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {name!r:.80}"
            f"{near_names(name, ALGORITHMS)}"
        )
    return changed((LIVE if live and name in LIVE else ALGORITHMS)[name], settings)
