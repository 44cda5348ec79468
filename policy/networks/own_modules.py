"""Publish a torch module of any kind: exported to ONNX, compared, then as `publish_onnx` does.

class Net(nn.Module):
    def forward(self, obs): ...          # (B, *shape) -> (B, K)

publish_module("data/run", Net(), head="categorical")
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from policy.inference.onnx_network import FLAT, FLOATS, INDICES, Input, OnnxNetwork, input_of
from policy.inference.own_models import OwnModel
from policy.inference.preprocessors import columns_of, plausible_columns
from policy.inference.spec import ONNX, ONNX_FILE, PolicySpec, SpecError
from policy.networks.export import ExportError, onnx_program
from storage.experience.interfaces import ReaderError
from storage.objects.opening import Root
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Discrete, MultiDiscrete

_TOLERANCE = 1e-5
_COMPARED = 1000
"""The observations of the log that the outputs are compared on."""


def publish_module(root: Root, module: nn.Module, **how: Any) -> str:
    """Publish a torch module; `how`: see policy.inference.own_models.OwnModel.

    Its `forward` takes the leaves of an observation as tensors, by their names: (B, *shape)
    float32, but the numbers of Discrete and MultiDiscrete options from 0 as int64. If there is only
    one leaf, its parameter may have any name; one named `flat` gets the flat observation. Other
    parameters keep their defaults. The result is (B, K): the parameters of the action distribution.

    The exported file's outputs are compared with the module's on observations of the log; raises
    ExportError if they differ. Needs the [export] extra.
    """
    own = OwnModel(**how)
    spec = own.spec(root, ONNX)
    inputs = _inputs(spec, module)
    was_training = module.training
    module.eval()
    try:
        model = _exported(spec, module, inputs)
        flat = spec.flattener.columns(_observed(root, own.policy_id, spec))
        with torch.no_grad():
            result = module(**_tensors(inputs, flat))
    finally:
        module.train(was_training)
    if not isinstance(result, torch.Tensor):
        raise SpecError(
            f"{type(module).__name__}: expected a tensor from forward, got {type(result).__name__}"
        )
    expected = result.cpu().numpy()
    found = OnnxNetwork(spec, model).outputs(flat)
    if not np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ExportError(
            f"{type(module).__name__}: expected the module's outputs from the exported file, got "
            f"others, by up to {np.abs(found - expected).max():.2g}"
        )
    return own.publish(root, spec, {ONNX_FILE: np.frombuffer(model, np.uint8)})


def _inputs(spec: PolicySpec, module: nn.Module) -> dict[str, Input]:
    """How each parameter of the module's `forward` is made of flat observations."""
    leaves = {leaf.path: leaf for leaf in spec.flattener.leaves}
    names = [
        name
        for name, one in inspect.signature(module.forward).parameters.items()
        if one.default is one.empty or name in leaves
    ]
    found = {}
    for name in names:
        only = len(names) == 1 and name != FLAT
        leaf = next(iter(leaves.values())) if only and len(leaves) == 1 else leaves.get(name)
        if leaf is None and name != FLAT:
            raise SpecError(
                f"forward: expected the parameter {FLAT!r}, or leaves of the observation "
                f"({sorted(leaves)}), got {name!r}"
            )
        dims = (spec.flattener.size,) if leaf is None else leaf.shape
        whole = leaf is not None and isinstance(leaf.space, (Discrete, MultiDiscrete))
        kind = INDICES if whole else FLOATS
        found[name] = input_of(spec, name, kind, ["batch", *dims], only=only)
    return found


def _tensors(inputs: Mapping[str, Input], flat: npt.NDArray[np.float32]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(made(flat))) for name, made in inputs.items()
    }


def _exported(spec: PolicySpec, module: nn.Module, inputs: Mapping[str, Input]) -> bytes:
    """The bytes of the module as an ONNX file."""
    example = _tensors(inputs, spec.flattener.columns(plausible_columns(spec.observation))[:3])
    file = io.BytesIO()
    onnx_program(module, example).save(file)
    return file.getvalue()


def _observed(root: Root, policy_id: str, spec: PolicySpec) -> dict[str, npt.NDArray[Any]]:
    """Observations of the log as columns; plausible ones if it has none of the spec's schema."""
    try:
        with ShardReader(
            root, policy_id=policy_id, schema_id=spec.schema_id, batch_size=_COMPARED
        ) as reader:
            return columns_of(spec.observation, "obs", reader.next())
    except ReaderError:
        return plausible_columns(spec.observation)
