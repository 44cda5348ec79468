"""The learner: batches in, updates and metrics out, and a checkpoint to resume from.

    learner = Learner(Policy(spec, seed=7), BanditConfig(objective="dr"), seed=7)
    for metrics in learner.run(reader):
        print(metrics["loss"])
    learner.save(path, reader_state=reader.state_dict())

A checkpoint is one safetensors file: weights and optimizer state as tensors, everything else as a
JSON document in its metadata, which also has a digest of every tensor. It is written to a temporary
file, synced and renamed. Reading it never executes anything. It includes the reader's position, so
that the position always matches what was learned.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import torch

from policy.algorithms.base import Algorithm, AlgorithmConfig, no_metrics, rows_left_out
from policy.inference.finite import NOT_FINITE
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.errors import WeightsDamaged, WeightsNotFound
from storage.experience.interfaces import ReaderState
from storage.experience.sample_batch import (
    EPISODE_ORDINAL,
    EPS_ID,
    ORDINAL,
    STREAM,
    SampleBatch,
)
from storage.reading.ledger import Ledger, Ranges
from storage.system.files import NotRegular, make_directory, read_regular, replace_file
from storage.weights.files import MAX_WEIGHTS
from storage.weights.manifest import canonical, open_document, seal_document
from storage.wording import counted

_log = logging.getLogger("headrace.learner")
Tensors = dict[str, npt.NDArray[Any]]
_DOCUMENT = "checkpoint"
_NAMED = 20  # episodes in one line of the log


@dataclass
class LearnerCounts:
    """What a learner has done since it was created, over all resumed runs; rows are steps."""

    updates: int = 0  # batches
    rows_read: int = 0
    rows_trained: int = 0
    excluded: dict[str, int] = field(default_factory=dict)  # why -> rows


class Learner:
    """Runs an algorithm's updates on a policy; deterministic under its seed.

    Attributes: `policy`; `algorithm`; `counts`; `lineage`, the ordinals trained on by stream;
    `warns`: whether it logs that no row of a batch could be learned from (once, until one can).
    """

    def __init__(self, policy: Policy, config: AlgorithmConfig, *, seed: int = 0) -> None:
        self.policy = policy
        self.config = config
        self.algorithm = config.build(policy)
        self.counts = LearnerCounts()
        self._rng = np.random.default_rng(seed)
        self._lineage = Ledger()
        self.warns = True
        self._warned = False

    def __repr__(self) -> str:
        counts = self.counts
        return (
            f"Learner({type(self.algorithm).__name__}, version {self.policy.version}; "
            f"{counted(counts.updates, 'update')}, {counts.rows_trained:,} of "
            f"{counted(counts.rows_read, 'row')} trained)"
        )

    @property
    def lineage(self) -> dict[str, list[list[int]]]:
        """Stream -> ranges of the ordinals that were trained on."""
        return self._lineage.to_json()

    def run(self, batches: Iterable[SampleBatch]) -> Iterator[dict[str, float]]:
        """Update on every batch, and yield the metrics of each."""
        for batch in batches:
            yield self.update(batch)

    def update(self, batch: SampleBatch, on_progress: Progress = no_progress) -> dict[str, float]:
        """Learn from a batch, and return metrics. A batch without usable rows changes no weights.

        Metrics always have the same names: `rows`, the number of rows trained on, `left_out`, the
        number of rows that could not be learned from, and the algorithm's `metric_names`. These are
        NaN if there was no row to learn from, or the update was reverted (`learn`). Raises
        ValueError for a batch that lacks columns.
        """
        return self.learn(*self.usable(batch), on_progress)

    def usable(self, batch: SampleBatch) -> tuple[SampleBatch, dict[str, int]]:
        """(the rows that the algorithm can use, reason -> number of the others). Counts nothing."""
        keep = np.ones(batch.count, np.bool_)
        left_out: dict[str, int] = {}
        reasons = rows_left_out(self.algorithm, batch) if batch.count else {}
        for reason, rows in reasons.items():
            number = int((rows & keep).sum())
            if number:
                left_out[reason] = number
            keep &= ~rows
        if NOT_FINITE in left_out:
            named = _episodes(batch.take(reasons[NOT_FINITE]))
            amount = counted(left_out[NOT_FINITE], "row is", "rows are")
            _log.warning("%s left out as %s, of %s", amount, NOT_FINITE, named)
        return (batch if keep.all() else batch.take(keep)), left_out

    def learn(
        self,
        used: SampleBatch,
        left_out: Mapping[str, int],
        on_progress: Progress = no_progress,
    ) -> dict[str, float]:
        """The second step of `update`, for a caller that collects the results of `usable` first.

        An update whose loss, weights or actions are not finite is reverted, and its rows are
        excluded as "not_finite": the metrics then have `rows` 0.
        """
        metrics = self._try(used, on_progress) if used.count else None
        reasons = Counter(left_out)
        trained = 0 if metrics is None else used.count
        if used.count > trained:
            reasons[NOT_FINITE] += used.count
        without = sum(reasons.values())
        self.counts.rows_read += trained + without
        for reason, number in reasons.items():
            self.counts.excluded[reason] = self.counts.excluded.get(reason, 0) + number
        if metrics is not None:
            self._record(used)
            self._warned = False
        elif without and self.warns and not self._warned:
            self._warned = True
            details = ", ".join(f"{reason}: {number}" for reason, number in reasons.items())
            _log.warning("none of %s can be learned from: %s", counted(without, "row"), details)
        self.counts.updates += 1
        learned = metrics or no_metrics(self.algorithm.metric_names)
        return {"rows": trained, "left_out": without, **learned}

    def _try(self, used: SampleBatch, on_progress: Progress) -> dict[str, float] | None:
        """The metrics of an update; None, with everything unchanged, if numbers were not finite."""
        policy, algorithm = self.policy, self.algorithm
        weights, filter_state = policy.get_weights(), policy.filter.to_json()
        optimizer = copy.deepcopy(algorithm.optimizer.state_dict())
        schedules = dict(algorithm.state_dict())
        networks = copy.deepcopy(_networks(algorithm).state_dict())
        try:
            policy.filter.push(policy.spec.flattener.features_of(policy.flat_observations(used)))
            metrics = algorithm.update(used, self._rng, on_progress)
            require_acting(policy)
        except FloatingPointError as error:
            policy.set_weights(weights, version=policy.version)
            policy.filter = Policy(policy.spec, filter_state=filter_state).filter
            algorithm.optimizer.load_state_dict(optimizer)
            algorithm.load_state_dict(schedules)
            _networks(algorithm).load_state_dict(networks)
            text, rows = (
                "an update is undone; %s left out as %s: %s; of %s",
                counted(used.count, "row"),
            )
            _log.error(text, rows, NOT_FINITE, error, _episodes(used))
            return None
        return metrics

    def _record(self, used: SampleBatch) -> None:
        self.counts.rows_trained += used.count
        if STREAM in used and ORDINAL in used:
            streams = used[STREAM]
            for stream in sorted(set(streams.tolist())):
                mine = np.asarray(streams == stream, np.bool_)
                self._lineage.add(stream, np.unique(used[ORDINAL][mine]))

    def go_on_from(
        self, weights: Mapping[str, npt.NDArray[Any]], lineage: Mapping[str, Ranges]
    ) -> None:
        """Continue from published weights and their lineage, for example if no checkpoint is left.

        The optimizer is reset; counts and schedules stay.
        """
        schedules = self.algorithm.state_dict()
        self.policy.set_weights(weights)
        self.algorithm = self.config.build(self.policy)
        self.algorithm.load_state_dict(schedules)
        self._lineage = Ledger(lineage)

    # checkpoints

    def save(self, path: Path | str, *, reader_state: Mapping[str, Any] | None = None) -> None:
        """Write everything that `load` needs to continue exactly, durably."""
        tensors = {f"weights/{k}": v for k, v in self.policy.get_weights().items()}
        for name, value in _networks(self.algorithm).state_dict().items():
            tensors[f"networks/{name}"] = value.detach().cpu().numpy().copy()
        optimizer, groups = optimizer_state(self.algorithm.optimizer)
        tensors |= optimizer
        body = {
            "spec": self.policy.spec.to_json(),
            "algorithm": type(self.config).__name__,
            "config": asdict(self.config),
            "algorithm_state": dict(self.algorithm.state_dict()),
            "optimizer_groups": groups,
            "filter_state": self.policy.filter.to_json(),
            "policy_version": self.policy.version,
            "rng": dict(self._rng.bit_generator.state),
            "counts": asdict(self.counts),
            "lineage": self.lineage,
            "reader_state": None if reader_state is None else dict(reader_state),
        }
        path = Path(path)
        make_directory(path.parent)
        replace_file(path, pack(_DOCUMENT, body, tensors))

    def load(self, path: Path | str) -> dict[str, Any] | None:
        """Resume from a checkpoint; returns the reader's state in it, if any.

        Raises WeightsDamaged for a damaged file, OSError for one that cannot be read now,
        ValueError for one of another spec or algorithm.
        """
        body, tensors = _read_checkpoint(Path(path))
        mine = (self.policy.spec.to_json(), type(self.config).__name__)
        if (body.spec, body.algorithm) != mine:
            raise ValueError(
                f"{path}: expected a checkpoint of this learner's spec and {mine[1]}, got one of "
                f"{'another' if body.spec != mine[0] else 'this'} spec and {body.algorithm}"
            )
        try:
            self._lineage = Ledger.from_json(body.lineage)
            restored = Policy(self.policy.spec, filter_state=body.filter_state)
            self.policy.set_weights(named(tensors, "weights"), version=body.policy_version)
            self.policy.filter = restored.filter
            networks = {k: torch.from_numpy(a) for k, a in named(tensors, "networks").items()}
            _networks(self.algorithm).load_state_dict(networks)
            restore_optimizer(self.algorithm.optimizer, tensors, body.optimizer_groups)
            self.algorithm.load_state_dict(body.algorithm_state)
            self._rng.bit_generator.state = body.rng
        except (KeyError, IndexError, TypeError, ValueError, ReaderState) as error:
            raise WeightsDamaged(f"{path}: {error!r:.200}") from error
        self.counts = body.counts
        return body.reader_state


def _networks(algorithm: Algorithm) -> torch.nn.Module:
    """The networks of an algorithm that outlive an update; empty if it has none."""
    found: torch.nn.Module = getattr(algorithm, "networks", torch.nn.Module())
    return found


def require_acting(policy: Policy) -> None:
    """Raise FloatingPointError unless weights and actions are finite, as a store requires."""
    for name, weights in policy.get_weights().items():
        if not np.isfinite(weights).all():
            raise FloatingPointError(f"the weights {name} became NaN or infinity")
    try:
        policy.to_numpy().require_finite()
    except ValueError as error:
        raise FloatingPointError(str(error)) from error


def _episodes(rows: SampleBatch) -> str:
    """Text with the first few episodes of rows, by id or by stream and number."""
    if EPS_ID in rows:
        names = rows[EPS_ID].tolist()
    elif STREAM in rows and EPISODE_ORDINAL in rows:
        pairs = zip(rows[STREAM].tolist(), rows[EPISODE_ORDINAL].tolist(), strict=True)
        names = [f"{stream}/{number}" for stream, number in pairs]
    else:
        return "unknown episodes"
    found = [str(name) for name in dict.fromkeys(names)]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"episodes {', '.join(found[:_NAMED])}{more}"


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[Tensors, list[dict[str, Any]]]:
    """(tensors named optimizer/{parameter}/{key}, parameter groups as JSON)."""
    state = optimizer.state_dict()
    tensors = {
        f"optimizer/{parameter}/{key}": value.detach().cpu().numpy().copy()
        for parameter, values in state["state"].items()
        for key, value in values.items()
    }
    return tensors, [dict(group) for group in state["param_groups"]]


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Tensors, groups: list[dict[str, Any]]
) -> None:
    """Restore the state of `optimizer_state` in an optimizer of the same parameters."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, array in named(tensors, "optimizer").items():
        parameter, key = name.split("/")
        state.setdefault(int(parameter), {})[key] = torch.from_numpy(array.copy())
    optimizer.load_state_dict({"state": state, "param_groups": groups})


class _Body(msgspec.Struct, kw_only=True):
    """The document of a checkpoint. An added field needs a default; unknown ones are ignored."""

    spec: dict[str, Any]
    algorithm: str
    algorithm_state: dict[str, Any]
    optimizer_groups: list[dict[str, Any]]
    filter_state: dict[str, Any] | None
    policy_version: int
    rng: dict[str, Any]
    counts: LearnerCounts
    lineage: dict[str, list[list[int]]]
    reader_state: dict[str, Any] | None


_decode_body = msgspec.json.Decoder(_Body).decode


def _read_checkpoint(path: Path) -> tuple[_Body, Tensors]:
    """Read a checkpoint. Raises WeightsDamaged unless `save` wrote it, NewerFormat, and OSError."""
    # not mapped: an I/O error on a mapped file kills the process
    try:
        data = read_regular(path, MAX_WEIGHTS)
    except FileNotFoundError as error:
        raise WeightsNotFound(f"expected {path}, which does not exist") from error
    except NotRegular as error:
        raise WeightsDamaged(str(error)) from error
    body, tensors = unpack(_DOCUMENT, data, path)
    try:
        return _decode_body(canonical(body)), tensors
    except msgspec.ValidationError as error:
        raise WeightsDamaged(f"{path}: {error}") from error


def pack(kind: str, body: Mapping[str, Any], tensors: Tensors) -> bytes:
    """Encode tensors and a document of this kind, with a digest of every tensor."""
    digests = {name: _digest(array) for name, array in tensors.items()}
    sealed = seal_document(kind, {**body, "tensors": digests}).decode()
    return safetensors.numpy.save(tensors, metadata={kind: sealed})


def unpack(kind: str, data: bytes, where: object) -> tuple[dict[str, Any], Tensors]:
    """Decode the result of `pack`: (body, tensors). Raises WeightsDamaged, NewerFormat."""
    try:
        tensors = safetensors.numpy.load(data)
        length = int.from_bytes(data[:8], "little")
        document = json.loads(data[8 : 8 + length])["__metadata__"][kind]
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeightsDamaged(f"{where}: {error!r:.200}") from error
    body = open_document(kind, document.encode(), where)
    if {name: _digest(array) for name, array in tensors.items()} != body.get("tensors"):
        raise WeightsDamaged(f"{where}: the tensors do not match their digests")
    return body, tensors


def named(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors in whose names this prefix comes first, without it."""
    start = f"{prefix}/"
    return {name[len(start) :]: a for name, a in tensors.items() if name.startswith(start)}


def _digest(array: npt.NDArray[Any]) -> str:
    described = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(described + np.ascontiguousarray(array).tobytes()).hexdigest()
