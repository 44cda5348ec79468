"""A worker's state as bytes: weights, optimizers, filters, global variables, random state.

Filters include the observations that were not merged yet. The state is one safetensors document:
arrays are tensors, and everything else is sealed JSON in its metadata, with a digest of every
array. Reading it never executes anything, and damage is detected before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.algorithms import learner
from policy.algorithms.learner import Tensors, named, optimizer_state, restore_optimizer
from policy.algorithms.trainable_policy import TrainablePolicy
from policy.inference.filters import MeanStdFilter, RunningStat
from storage.errors import WeightsDamaged
from storage.system.files import make_directory, replace_file

_KIND = "worker"
_WHERE = "worker state"
FORMAT = 1


def filter_to_json(one: MeanStdFilter) -> dict[str, Any]:
    """A filter with its buffer, as JSON."""
    return {**one.to_json(), "buffer": one.buffer.to_json()}


def filter_from_json(document: Mapping[str, Any], size: int) -> MeanStdFilter:
    """Parse the result of `filter_to_json`. Raises ValueError."""
    body = dict(document)
    buffer = RunningStat.from_json(body.pop("buffer"), size)
    made = MeanStdFilter.from_json(body, size)
    made.buffer = buffer
    return made


def pack(
    policies: Mapping[str, TrainablePolicy],
    filters: Mapping[str, MeanStdFilter],
    *,
    global_vars: Mapping[str, Any],
    rng: Mapping[str, Any],
) -> bytes:
    """Encode the state as one document."""
    tensors: Tensors = {}
    described: dict[str, Any] = {}
    for place, (policy_id, policy) in enumerate(policies.items()):
        document: dict[str, Any] = {
            "id": policy_id,
            "spec": policy.spec.to_json(),
            "version": policy.version,
            "filter": filter_to_json(filters[policy_id]) if policy_id in filters else None,
            "groups": None,
            "algorithm": None,
        }
        tensors |= {f"{place}/weights/{k}": v for k, v in policy.get_weights().items()}
        if policy.spec.module.value_head:
            found, document["groups"] = optimizer_state(policy.algorithm.optimizer)
            document["algorithm"] = dict(policy.algorithm.state_dict())
            tensors |= {f"{place}/{name}": array for name, array in found.items()}
        described[str(place)] = document
    body = {
        "state_format": FORMAT,
        "policies": described,
        "global_vars": dict(global_vars),
        "rng": dict(rng),
    }
    return learner.pack(_KIND, body, tensors)


def unpack(data: bytes) -> tuple[dict[str, Any], Tensors]:
    """Decode the result of `pack`: (body, tensors). Raises WeightsDamaged."""
    body, tensors = learner.unpack(_KIND, data, _WHERE)
    if body["state_format"] != FORMAT:
        raise WeightsDamaged(
            f"{_WHERE}: expected state format {FORMAT}, got {body['state_format']!r:.40}"
        )
    return body, tensors


def check_fits(body: Mapping[str, Any], policies: Mapping[str, TrainablePolicy]) -> None:
    """Raise ValueError unless the state belongs to policies with these ids and specs."""
    specs = {one["id"]: one["spec"] for one in body["policies"].values()}
    mine = {policy_id: policy.spec.to_json() for policy_id, policy in policies.items()}
    if specs != mine:
        different = sorted(k for k in {*specs, *mine} if specs.get(k) != mine.get(k))
        fields = "".join(
            f"; {name!r}: {text}"
            for name in different
            if name in specs and name in mine
            for text in _differences(mine[name], specs[name])
        )
        raise ValueError(
            f"restore: expected the state of the policies {sorted(mine)} with their specs, got "
            f"{sorted(specs)}; these differ: {different}{fields}"
        )


def _differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """The fields in which two documents differ, with both values."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        inner = (
            _differences(mine.get(k), theirs.get(k), f"{path}.{k}" if path else k)
            for k in sorted({*mine, *theirs})
        )
        return [text for texts in inner for text in texts]
    return [] if mine == theirs else [f"{path}: expected {mine!r:.80}, got {theirs!r:.80}"]


def restore_policy(policy: TrainablePolicy, document: Mapping[str, Any], tensors: Tensors) -> None:
    """Restore a policy's weights, optimizer and schedules."""
    policy.set_weights(named(tensors, "weights"), version=document["version"])
    if document["groups"] is None:
        return
    restore_optimizer(policy.algorithm.optimizer, tensors, document["groups"])
    policy.algorithm.load_state_dict(document["algorithm"])


def write_bytes(path: Path | str, data: bytes) -> Path:
    """Replace a file by these bytes, atomically and durably, and return its path."""
    target = Path(path)
    make_directory(target.parent)
    replace_file(target, data)
    return target
