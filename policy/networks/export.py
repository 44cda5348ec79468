"""Policies for other programs: the network as torch.export or ONNX, the weights as safetensors.

The exported network maps filtered flat observations (B, D) to `dist_inputs` (B, K): see
policy.inference.preprocessors, policy.inference.filters and policy.inference.action_layout, and the
spec, which is written to the same folder.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from policy.inference.onnx_network import OnnxNetwork
from policy.inference.spec import ONNX
from policy.networks.policy import Policy
from storage.system.files import make_directory, replace_file

_TOLERANCE = 1e-5


class ExportError(RuntimeError):
    """The exported file gives other outputs than the policy."""


def export_model(policy: Policy, directory: Path | str) -> Path:
    """Write `model.pt2` (torch.export, any batch size) and `spec.json`; return the model's path.

    torch.export.load reads the file, which is in torch's own format. Its outputs are compared with
    the policy's; raises ExportError if they differ.
    """
    folder = _folder(policy, directory)
    module, example = policy.module.eval(), _example(policy, 3)
    # torch would take a batch of 0 or 1 for a constant: with 3 rows, any number is allowed
    shapes = {"flat": {0: torch.export.Dim("batch")}}
    program = torch.export.export(module, (example,), dynamic_shapes=shapes)
    _check(policy, lambda rows: program.module()(rows).detach().numpy(), "torch.export")
    path = folder / "model.pt2"
    torch.export.save(program, path)
    return path


def export_onnx(policy: Policy, directory: Path | str) -> Path:
    """Write `model.onnx` (input `flat`, output `dist_inputs`) and `spec.json`; return its path.

    Needs the [export] extra. The outputs of onnxruntime are compared with torch's; raises
    ExportError if they differ.
    """
    folder = _folder(policy, directory)
    path = folder / "model.onnx"
    onnx_program(policy.module.eval(), {"flat": _example(policy, 3)}).save(str(path))
    plain = replace(policy.spec, module=ONNX, observation_filter="NoFilter")
    network = OnnxNetwork(plain, path.read_bytes())
    _check(policy, lambda rows: network.outputs(rows.numpy()), "ONNX")
    return path


def onnx_program(module: torch.nn.Module, example: Mapping[str, torch.Tensor]) -> Any:
    """A module as an ONNX program with the inputs of an example (more than one row) and any batch.

    Needs the [export] extra.
    """
    try:
        import onnxscript  # noqa: F401, PLC0415  an optional extra, which torch.onnx needs
    except ImportError as error:
        raise ImportError(
            "export to ONNX needs the [export] extra: pip install 'headrace[export]'"
        ) from error
    with warnings.catch_warnings():  # of torch about itself, and that inputs have one batch size
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.`", FutureWarning)
        warnings.filterwarnings("ignore", "# The axis name: batch will not be used", UserWarning)
        return torch.onnx.export(
            module,
            (),
            kwargs=dict(example),
            input_names=list(example),
            output_names=["dist_inputs"],
            dynamic_shapes={name: {0: torch.export.Dim("batch")} for name in example},
            opset_version=20,
            dynamo=True,
            verbose=False,
        )


def export_checkpoint(policy: Policy, directory: Path | str, prefix: str = "model") -> Path:
    """Write the weights and their description, and return the weights' path.

    `{prefix}.safetensors` has the state_dict, `{prefix}.json` the spec, filter state and version.
    """
    folder = Path(directory)
    make_directory(folder)
    path = folder / f"{prefix}.safetensors"
    replace_file(path, safetensors.numpy.save(policy.get_weights()))
    document = {
        "spec": policy.spec.to_json(),
        "filter_state": policy.filter.to_json(),
        "policy_version": policy.version,
    }
    replace_file(folder / f"{prefix}.json", json.dumps(document, indent=2).encode())
    return path


def _folder(policy: Policy, directory: Path | str) -> Path:
    folder = Path(directory)
    make_directory(folder)
    replace_file(folder / "spec.json", json.dumps(policy.spec.to_json(), indent=2).encode())
    return folder


def _example(policy: Policy, rows: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.normal(size=(rows, policy.spec.flattener.size)).astype(np.float32))


def _check(policy: Policy, run: Any, what: str) -> None:
    """Raise ExportError unless the outputs agree on a batch of another size than the traced one."""
    rows = _example(policy, 7)
    with torch.no_grad():
        expected = policy.module(rows).numpy()
    found = np.asarray(run(rows))
    if found.shape != expected.shape or not np.allclose(found, expected, atol=_TOLERANCE):
        raise ExportError(
            f"{what}: expected the policy's outputs from the exported file, got other numbers"
        )
