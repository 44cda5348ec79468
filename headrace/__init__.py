"""Collect experience from production traffic, train on it, and publish the weights to clients.

`headrace.__all__` is everything that users import, without the names of extras that are not
installed. Names are loaded when they are first used (PEP 562), so a service that only logs loads
neither torch nor Arrow.

Exceptions:

    IngestError                     anything between clients and the collector
    ├── Refusal (ValueError)        a rejected request or event: code, HTTP status, place
    ├── ClientError                 the collector cannot be used as requested
    │   ├── CollectorUnavailable (ConnectionError)   no answer in time
    │   └── BufferFull              the client's queue of events is full
    ├── ServingStopped              the program behind an ExternalEnv, or its worker, has ended
    ├── TokenError (ValueError)     a token cannot be made, found or read
    ├── ImportFailed                a log cannot be imported
    ├── ServeError                  the collector cannot start; the text says what to change
    └── CollectorFailed             the journal failed: restart and replay
    StorageError                    anything in files
    ├── FolderMoved                 a folder in use is no longer at its path
    ├── JournalError
    │   ├── JournalLocked           another process holds the journal
    │   │   └── JournalLookedAt     other processes read it; try again
    │   ├── JournalBehind           shards are later, as after a restore: run `headrace adopt`
    │   ├── JournalFull             no space left: rolled back, the journal stays usable
    │   └── JournalFailed           a write or a sync failed
    ├── NewerFormat                 a later release wrote this; use that one
    ├── ObjectError                 anything in `Objects`
    │   ├── ObjectNotFound (FileNotFoundError)   no object has this name
    │   ├── ObjectExists (FileExistsError)       the name is taken
    │   ├── ObjectChanged           another writer was first
    │   └── ObjectUnusable (OSError)   something else has the name, or it is too long
    ├── NothingYet                  no data, candidate or live version so far; try again later
    ├── WeightStoreError
    │   ├── WeightsNotFound         no such candidate or version
    │   ├── WeightsDamaged          a digest does not match, or a document cannot be read
    │   ├── WeightsRefused (ValueError)   weights that their spec cannot act with
    │   ├── PolicyPinned            a rollback holds until `headrace resume`
    │   ├── GenerationConflict      the live version was changed in the meantime
    │   │   └── LiveChanged         another candidate or generation is live than the caller named
    │   └── LeaseHeld               another follower trains this policy
    ├── ShardError
    │   ├── ShardDamaged            a file does not match its name or its format
    │   ├── ShardWriteError         a shard could not be written
    │   └── WriterDied              the shard writer ended before it answered
    └── ReaderError
        ├── EndOfInput              nothing is left to read
        ├── MixedSchemas            the data has several schemas, and none was chosen
        └── ReaderState             a saved position does not belong to this reader
    ValueError                      an argument or a document is wrong
    ├── SpaceError, DeclarationError, SpecError, EpisodeError, BatchError, NotFinite
    ├── ExportFailed                a log cannot be written in a format
    └── FrozenDataError, NothingToFreeze, NothingToTrainOn, DataIncomplete
    AssertionError
    └── ConformanceError            an implementation breaks a promise of its protocol
    RuntimeError
    ├── EnvFailed                   an environment failed more often than it may
    └── ExportError                 a policy cannot be exported
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

from headrace.extras import missing_extra

if TYPE_CHECKING:
    from ingest.access.tokens import TokenError as TokenError
    from ingest.client.async_client import AsyncPolicyClient as AsyncPolicyClient
    from ingest.client.policy_client import PolicyClient as PolicyClient
    from ingest.client.publisher import Publisher as Publisher
    from ingest.delivery.client_stats import ClientStats as ClientStats
    from ingest.embedded.external_env import ExternalEnv as ExternalEnv
    from ingest.embedded.external_multi_agent_env import (
        ExternalMultiAgentEnv as ExternalMultiAgentEnv,
    )
    from ingest.embedded.policy_server_input import PolicyServerInput as PolicyServerInput
    from ingest.importing.importing import import_table as import_table
    from ingest.importing.options import ImportArguments as ImportArguments
    from ingest.importing.options import ImportOptions as ImportOptions
    from ingest.importing.report import BadRow as BadRow
    from ingest.importing.report import ImportReport as ImportReport
    from ingest.protocol.errors import BufferFull as BufferFull
    from ingest.protocol.errors import ClientError as ClientError
    from ingest.protocol.errors import CollectorFailed as CollectorFailed
    from ingest.protocol.errors import CollectorUnavailable as CollectorUnavailable
    from ingest.protocol.errors import ImportFailed as ImportFailed
    from ingest.protocol.errors import IngestError as IngestError
    from ingest.protocol.errors import Refusal as Refusal
    from ingest.protocol.errors import ServingStopped as ServingStopped
    from ingest.protocol.messages import NowLive as NowLive
    from ingest.protocol.messages import RankReply as RankReply
    from ingest.protocol.messages import Versions as Versions
    from ingest.server.listening import ServeError as ServeError
    from policy.algorithms import torchrl as torchrl
    from policy.algorithms.bandit import BanditConfig as BanditConfig
    from policy.algorithms.base import AlgorithmConfig as AlgorithmConfig
    from policy.algorithms.by_name import algorithm as algorithm
    from policy.algorithms.conformance import AlgorithmConformance as AlgorithmConformance
    from policy.algorithms.cql import CQLConfig as CQLConfig
    from policy.algorithms.learner import Learner as Learner
    from policy.algorithms.ppo import PPOConfig as PPOConfig
    from policy.algorithms.trainable_policy import TrainablePolicy as TrainablePolicy
    from policy.data.freeze import FrozenDataError as FrozenDataError
    from policy.data.freeze import NothingToFreeze as NothingToFreeze
    from policy.data.run_once import DataIncomplete as DataIncomplete
    from policy.envs.base_env import BaseEnv as BaseEnv
    from policy.envs.conformance import BaseEnvConformance as BaseEnvConformance
    from policy.envs.env_context import EnvContext as EnvContext
    from policy.envs.env_runner import EnvFailed as EnvFailed
    from policy.envs.env_runner import EnvRunner as EnvRunner
    from policy.exporting.ray_data import read_ray as read_ray
    from policy.exporting.runs import ExportFailed as ExportFailed
    from policy.inference.action_rule import ActionRule as ActionRule
    from policy.inference.distributions import NotFinite as NotFinite
    from policy.inference.own_models import OwnModel as OwnModel
    from policy.inference.own_models import publish_mlp as publish_mlp
    from policy.inference.own_models import publish_onnx as publish_onnx
    from policy.inference.spec import ModuleSpec as ModuleSpec
    from policy.inference.spec import PolicySpec as PolicySpec
    from policy.inference.spec import SpecError as SpecError
    from policy.inference.weight_store import WeightStore as WeightStore
    from policy.networks.export import ExportError as ExportError
    from policy.networks.own_modules import publish_module as publish_module
    from policy.networks.policy import Policy as Policy
    from policy.ope import estimators as estimators
    from policy.ope.episodes import Episodes as Episodes
    from policy.ope.estimators import Estimate as Estimate
    from policy.ope.intervals import Bootstrap as Bootstrap
    from policy.ope.intervals import StudentT as StudentT
    from policy.sampling.callbacks import Callbacks as Callbacks
    from policy.sampling.metrics import RolloutMetrics as RolloutMetrics
    from policy.training.train import NothingToTrainOn as NothingToTrainOn
    from policy.worker.batch_io import IOContext as IOContext
    from policy.worker.group import WorkerGroup as WorkerGroup
    from policy.worker.rollout_worker import RolloutWorker as RolloutWorker
    from storage.conformance import ConformanceError as ConformanceError
    from storage.declarations.declaration import DeclarationError as DeclarationError
    from storage.declarations.declaration import PolicyDeclaration as PolicyDeclaration
    from storage.declarations.policy_files import load_declarations as load_declarations
    from storage.declarations.policy_files import save_declaration as save_declaration
    from storage.errors import FolderMoved as FolderMoved
    from storage.errors import GenerationConflict as GenerationConflict
    from storage.errors import JournalBehind as JournalBehind
    from storage.errors import JournalError as JournalError
    from storage.errors import JournalFailed as JournalFailed
    from storage.errors import JournalFull as JournalFull
    from storage.errors import JournalLocked as JournalLocked
    from storage.errors import JournalLookedAt as JournalLookedAt
    from storage.errors import LeaseHeld as LeaseHeld
    from storage.errors import LiveChanged as LiveChanged
    from storage.errors import NewerFormat as NewerFormat
    from storage.errors import NothingYet as NothingYet
    from storage.errors import ObjectChanged as ObjectChanged
    from storage.errors import ObjectError as ObjectError
    from storage.errors import ObjectExists as ObjectExists
    from storage.errors import ObjectNotFound as ObjectNotFound
    from storage.errors import ObjectUnusable as ObjectUnusable
    from storage.errors import PolicyPinned as PolicyPinned
    from storage.errors import StorageError as StorageError
    from storage.errors import WeightsDamaged as WeightsDamaged
    from storage.errors import WeightsNotFound as WeightsNotFound
    from storage.errors import WeightsRefused as WeightsRefused
    from storage.errors import WeightStoreError as WeightStoreError
    from storage.experience.conformance import InputReaderConformance as InputReaderConformance
    from storage.experience.episode import Episode as Episode
    from storage.experience.episode import EpisodeError as EpisodeError
    from storage.experience.episode import Part as Part
    from storage.experience.episode import Step as Step
    from storage.experience.interfaces import EndOfInput as EndOfInput
    from storage.experience.interfaces import InputReader as InputReader
    from storage.experience.interfaces import MixedSchemas as MixedSchemas
    from storage.experience.interfaces import OutputWriter as OutputWriter
    from storage.experience.interfaces import ReaderError as ReaderError
    from storage.experience.interfaces import ReaderState as ReaderState
    from storage.experience.multi_agent_batch import MultiAgentBatch as MultiAgentBatch
    from storage.experience.range_set import RangeSet as RangeSet
    from storage.experience.sample_batch import BatchError as BatchError
    from storage.experience.sample_batch import SampleBatch as SampleBatch
    from storage.experience.sample_batch import concat_samples as concat_samples
    from storage.objects.conformance import ObjectsConformance as ObjectsConformance
    from storage.objects.folder import FolderObjects as FolderObjects
    from storage.objects.interface import Objects as Objects
    from storage.objects.memory import MemoryObjects as MemoryObjects
    from storage.objects.ranged import RangedFile as RangedFile
    from storage.reading.adapters import to_torch_dataset as to_torch_dataset
    from storage.reading.conformance import ShardSourceConformance as ShardSourceConformance
    from storage.reading.exclusion import ReaderStats as ReaderStats
    from storage.reading.listing import ShardFile as ShardFile
    from storage.reading.multi_agent_reader import MultiAgentReader as MultiAgentReader
    from storage.reading.objects_source import ObjectsSource as ObjectsSource
    from storage.reading.shard_reader import ShardReader as ShardReader
    from storage.reading.shard_reader import read_position as read_position
    from storage.reading.sources import DirectorySource as DirectorySource
    from storage.reading.sources import ShardSource as ShardSource
    from storage.shards.arrow_arrays import decode_column as decode_column
    from storage.shards.names import ShardDamaged as ShardDamaged
    from storage.shards.names import ShardError as ShardError
    from storage.shards.names import ShardInfo as ShardInfo
    from storage.shards.names import ShardWriteError as ShardWriteError
    from storage.shards.names import WriterDied as WriterDied
    from storage.shards.output_writer import ParquetOutputWriter as ParquetOutputWriter
    from storage.shards.shard import ShardWriter as ShardWriter
    from storage.shards.shard import read_shard as read_shard
    from storage.shards.shard import to_pandas as to_pandas
    from storage.spaces.candidates import Candidates as Candidates
    from storage.spaces.descriptors import Box as Box
    from storage.spaces.descriptors import Dict as Dict
    from storage.spaces.descriptors import Discrete as Discrete
    from storage.spaces.descriptors import MultiBinary as MultiBinary
    from storage.spaces.descriptors import MultiDiscrete as MultiDiscrete
    from storage.spaces.descriptors import Space as Space
    from storage.spaces.descriptors import SpaceError as SpaceError
    from storage.spaces.descriptors import Text as Text
    from storage.spaces.descriptors import Tuple as Tuple
    from storage.spaces.descriptors import parse_space as parse_space
    from storage.spaces.descriptors import space_from_json as space_from_json
    from storage.spaces.descriptors import space_to_json as space_to_json
    from storage.spaces.gymnasium_spaces import from_gym as from_gym
    from storage.spaces.gymnasium_spaces import to_gym as to_gym
    from storage.weights.manifest import Candidate as Candidate
    from storage.weights.manifest import Live as Live
    from storage.weights.manifest import Manifest as Manifest
    from storage.weights.store import WeightFolder as WeightFolder

# The public names that each module defines.
_NAMES = {
    "ingest.access.tokens": "TokenError",
    "ingest.client.async_client": "AsyncPolicyClient",
    "ingest.client.policy_client": "PolicyClient",
    "ingest.client.publisher": "Publisher",
    "ingest.delivery.client_stats": "ClientStats",
    "ingest.embedded.external_env": "ExternalEnv",
    "ingest.embedded.external_multi_agent_env": "ExternalMultiAgentEnv",
    "ingest.embedded.policy_server_input": "PolicyServerInput",
    "ingest.importing.importing": "import_table",
    "ingest.importing.options": "ImportArguments ImportOptions",
    "ingest.importing.report": "BadRow ImportReport",
    "ingest.protocol.errors": (
        "BufferFull ClientError CollectorFailed CollectorUnavailable ImportFailed IngestError "
        "Refusal ServingStopped"
    ),
    "ingest.protocol.messages": "NowLive RankReply Versions",
    "ingest.server.listening": "ServeError",
    "policy.algorithms.bandit": "BanditConfig",
    "policy.algorithms.base": "AlgorithmConfig",
    "policy.algorithms.by_name": "algorithm",
    "policy.algorithms.conformance": "AlgorithmConformance",
    "policy.algorithms.cql": "CQLConfig",
    "policy.algorithms.learner": "Learner",
    "policy.algorithms.ppo": "PPOConfig",
    "policy.algorithms.torchrl": "torchrl",
    "policy.algorithms.trainable_policy": "TrainablePolicy",
    "policy.data.freeze": "FrozenDataError NothingToFreeze",
    "policy.data.run_once": "DataIncomplete",
    "policy.envs.base_env": "BaseEnv",
    "policy.envs.conformance": "BaseEnvConformance",
    "policy.envs.env_context": "EnvContext",
    "policy.envs.env_runner": "EnvFailed EnvRunner",
    "policy.exporting.ray_data": "read_ray",
    "policy.exporting.runs": "ExportFailed",
    "policy.inference.action_rule": "ActionRule",
    "policy.inference.distributions": "NotFinite",
    "policy.inference.own_models": "OwnModel publish_mlp publish_onnx",
    "policy.inference.spec": "ModuleSpec PolicySpec SpecError",
    "policy.inference.weight_store": "WeightStore",
    "policy.networks.export": "ExportError",
    "policy.networks.own_modules": "publish_module",
    "policy.networks.policy": "Policy",
    "policy.ope.episodes": "Episodes",
    "policy.ope.estimators": "Estimate estimators",
    "policy.ope.intervals": "Bootstrap StudentT",
    "policy.sampling.callbacks": "Callbacks",
    "policy.sampling.metrics": "RolloutMetrics",
    "policy.training.train": "NothingToTrainOn",
    "policy.worker.batch_io": "IOContext",
    "policy.worker.group": "WorkerGroup",
    "policy.worker.rollout_worker": "RolloutWorker",
    "storage.conformance": "ConformanceError",
    "storage.declarations.declaration": "DeclarationError PolicyDeclaration",
    "storage.declarations.policy_files": "load_declarations save_declaration",
    "storage.errors": (
        "FolderMoved GenerationConflict JournalBehind JournalError JournalFailed JournalFull "
        "JournalLocked JournalLookedAt LeaseHeld LiveChanged NewerFormat NothingYet ObjectChanged "
        "ObjectError ObjectExists ObjectNotFound ObjectUnusable PolicyPinned StorageError "
        "WeightStoreError WeightsDamaged WeightsNotFound WeightsRefused"
    ),
    "storage.experience.conformance": "InputReaderConformance",
    "storage.experience.episode": "Episode EpisodeError Part Step",
    "storage.experience.interfaces": (
        "EndOfInput InputReader MixedSchemas OutputWriter ReaderError ReaderState"
    ),
    "storage.experience.multi_agent_batch": "MultiAgentBatch",
    "storage.experience.range_set": "RangeSet",
    "storage.experience.sample_batch": "BatchError SampleBatch concat_samples",
    "storage.objects.conformance": "ObjectsConformance",
    "storage.objects.folder": "FolderObjects",
    "storage.objects.interface": "Objects",
    "storage.objects.memory": "MemoryObjects",
    "storage.objects.ranged": "RangedFile",
    "storage.reading.conformance": "ShardSourceConformance",
    "storage.reading.adapters": "to_torch_dataset",
    "storage.reading.exclusion": "ReaderStats",
    "storage.reading.listing": "ShardFile",
    "storage.reading.multi_agent_reader": "MultiAgentReader",
    "storage.reading.objects_source": "ObjectsSource",
    "storage.reading.shard_reader": "ShardReader read_position",
    "storage.reading.sources": "DirectorySource ShardSource",
    "storage.shards.arrow_arrays": "decode_column",
    "storage.shards.names": "ShardDamaged ShardError ShardInfo ShardWriteError WriterDied",
    "storage.shards.output_writer": "ParquetOutputWriter",
    "storage.shards.shard": "ShardWriter read_shard to_pandas",
    "storage.spaces.candidates": "Candidates",
    "storage.spaces.descriptors": (
        "Box Dict Discrete MultiBinary MultiDiscrete Space SpaceError Text Tuple parse_space "
        "space_from_json space_to_json"
    ),
    "storage.spaces.gymnasium_spaces": "from_gym to_gym",
    "storage.weights.manifest": "Candidate Live Manifest",
    "storage.weights.store": "WeightFolder",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
# What packages beyond the base install are needed by, so that `dir` and `__all__` have only names
# that can be loaded.
_SERVER = "ingest.embedded.policy_server_input"
_READERS = (
    "policy.data.freeze",
    "policy.data.run_once",
    "policy.exporting.ray_data",
    "policy.exporting.runs",
    "policy.networks.own_modules",
    "policy.training.train",
    "storage.reading.multi_agent_reader",
    "storage.reading.shard_reader",
)
_SOURCES = (
    "storage.reading.conformance",
    "storage.reading.objects_source",
    "storage.reading.sources",
)
_SHARDS = (
    _SERVER,
    *_READERS,
    "storage.reading.adapters",
    "storage.shards.output_writer",
    "storage.shards.shard",
)
_NEEDED_BY = {
    "blake3": _SHARDS,
    "gymnasium": (
        "policy.algorithms.trainable_policy",
        "policy.envs.base_env",
        "policy.envs.conformance",
        "policy.worker.rollout_worker",
        "storage.spaces.gymnasium_spaces",
    ),
    "httptools": (_SERVER,),
    "pyarrow": (*_SHARDS, "ingest.importing.importing", "storage.shards.arrow_arrays"),
    "scipy": (
        "policy.ope.estimators",
        "policy.ope.intervals",
        "policy.worker.rollout_worker",
    ),
    "torch": (
        "policy.algorithms",
        "policy.training.train",
        "policy.networks",
        "policy.worker.rollout_worker",
    ),
    "uvicorn": (_SERVER,),
    "uvloop": (_SERVER,),
    "watchdog": (_SERVER, *_READERS, *_SOURCES),
}

if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name

    def _installed() -> list[str]:
        """The public names that can be loaded with the extras of this install."""
        missing = (homes for needed, homes in _NEEDED_BY.items() if find_spec(needed) is None)
        absent = tuple(chain.from_iterable(missing))
        return sorted(name for name, home in _HOMES.items() if not home.startswith(absent))

    def __getattr__(name: str) -> Any:
        if name == "__all__":  # computed when it is asked for, as it looks for modules
            return _installed()
        if name == "__version__":
            return metadata.version("headrace")
        if name not in _HOMES:
            raise AttributeError(f"module 'headrace' has no attribute {name!r}")
        try:
            home = import_module(_HOMES[name])
        except ModuleNotFoundError as missing:
            raise missing_extra(missing, f"headrace.{name}") or missing from missing
        except AttributeError as error:
            # in `from headrace import X`, an AttributeError would lose its text and cause
            text = f"headrace.{name}: {_HOMES[name]} cannot be loaded: {error}"
            raise ImportError(text) from error
        return home if _HOMES[name].endswith(f".{name}") else getattr(home, name)

    def __dir__() -> list[str]:
        return sorted(["__all__", "__doc__", "__name__", "__version__", *_installed()])
