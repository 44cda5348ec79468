"""Carry experience to a learner and better weights back.

Names are loaded when they are first used (PEP 562).
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
    from policy.algorithms.trainable_policy import TrainablePolicy as TrainablePolicy
    from policy.envs.env_runner import EnvRunner as EnvRunner
    from policy.inference.spec import PolicySpec as PolicySpec
    from policy.networks.policy import Policy as Policy
    from policy.ope import estimators as estimators
    from policy.sampling.callbacks import Callbacks as Callbacks
    from policy.worker.group import WorkerGroup as WorkerGroup
    from policy.worker.rollout_worker import RolloutWorker as RolloutWorker
    from storage.experience.episode import Episode as Episode
    from storage.experience.interfaces import InputReader as InputReader
    from storage.experience.interfaces import OutputWriter as OutputWriter
    from storage.experience.multi_agent_batch import MultiAgentBatch as MultiAgentBatch
    from storage.experience.sample_batch import SampleBatch as SampleBatch
    from storage.reading.multi_agent_reader import MultiAgentReader as MultiAgentReader
    from storage.reading.shard_reader import ShardReader as ShardReader
    from storage.shards.arrow_arrays import decode_column as decode_column
    from storage.shards.output_writer import ParquetOutputWriter as ParquetOutputWriter
    from storage.shards.shard import ShardWriter as ShardWriter
    from storage.shards.shard import read_shard as read_shard
    from storage.shards.shard import to_pandas as to_pandas
    from storage.weights.store import WeightStore as WeightStore

_HOMES = {
    "Callbacks": "policy.sampling.callbacks",
    "EnvRunner": "policy.envs.env_runner",
    "Episode": "storage.experience.episode",
    "ExternalEnv": "ingest.embedded.external_env",
    "ExternalMultiAgentEnv": "ingest.embedded.external_multi_agent_env",
    "InputReader": "storage.experience.interfaces",
    "MultiAgentBatch": "storage.experience.multi_agent_batch",
    "MultiAgentReader": "storage.reading.multi_agent_reader",
    "OutputWriter": "storage.experience.interfaces",
    "ParquetOutputWriter": "storage.shards.output_writer",
    "Policy": "policy.networks.policy",
    "PolicyClient": "ingest.client.policy_client",
    "PolicyServerInput": "ingest.embedded.policy_server_input",
    "PolicySpec": "policy.inference.spec",
    "RolloutWorker": "policy.worker.rollout_worker",
    "SampleBatch": "storage.experience.sample_batch",
    "ShardReader": "storage.reading.shard_reader",
    "ShardWriter": "storage.shards.shard",
    "TrainablePolicy": "policy.algorithms.trainable_policy",
    "WeightStore": "storage.weights.store",
    "WorkerGroup": "policy.worker.group",
    "decode_column": "storage.shards.arrow_arrays",
    "estimators": "policy.ope.estimators",
    "read_shard": "storage.shards.shard",
    "to_pandas": "storage.shards.shard",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if _HOMES[name].endswith(f".{name}") else getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
