"""What an ONNX file must be before it is stored or run: a bounded, pure function of observations.

A child process with limits on memory and time parses the file, checks it, and acts with it first.
Only files that pass become candidates, so that those who act with versions run checked files alone.

- Its operators are on a list, of one domain and of opsets that the oldest onnxruntime knows. They
  have no subgraphs, so that nothing loops, and no randomness. There are no functions.
- All data is in the file.
- Every shape follows from the batch size, and no result is larger than `MAX_NUMBERS` for one
  observation, in each of the sizes in which a file is run.
- It is loaded, and acts on plausible observations, within `RUN_SECONDS`. The results are finite,
  and each depends on its own observation alone.

The child is `python -m policy.inference.onnx_gate`: the spec as a line of JSON, then the file, come
on stdin; the fault goes to stdout, with status 1.
"""

# ruff: noqa: PLC0415 - onnx is an optional extra, and only the child needs it

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.onnx_network import BATCHES, MAX_FILE, onnx_bytes
from policy.inference.spec import ONNX_FILE, PolicySpec
from storage.system.process import own_environment

OPSETS = range(11, 22)
"""The versions of the operators; onnxruntime 1.20, the oldest that clients may have, knows 21."""
IR_VERSIONS = range(4, 11)
MAX_NODES = 10_000
MAX_NUMBERS = 2**22
RUN_SECONDS = 1.0
"""Processor time for loading the file and the first actions."""
MEMORY = 2 * 2**30
"""The child's address space in bytes, to which four times the file's size is added."""
_WAIT = 60.0  # seconds, however busy the machine is
_TOLERANCE = 1e-4
_LONGEST = 400  # characters of a fault: those of onnx repeat names in the file
_LISTED = (
    "Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization"
    " Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh"
    " CumSum DepthToSpace DequantizeLinear Div Einsum Elu Equal Erf Exp Expand EyeLike Flatten"
    " Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater"
    " GreaterOrEqual GroupNormalization HardSigmoid HardSwish Hardmax Identity"
    " InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log"
    " LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean"
    " MeanVarianceNormalization Min Mish Mod Mul Neg Not OneHot Or PRelu Pad Pow QLinearConv"
    " QLinearMatMul QuantizeLinear RNN Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum"
    " ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu"
    " Reshape Resize Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size"
    " Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh"
    " ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor"
)
_OPERATORS = frozenset(_LISTED.split())


def _refused(what: str) -> ValueError:
    return ValueError(f"{ONNX_FILE}: {what}")


def require_sound(spec: PolicySpec, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ValueError unless the weights are an ONNX file that may be stored and run."""
    model = onnx_bytes(weights).tobytes()
    for name, extra in (("onnx", "export"), ("onnxruntime", "onnx")):
        if find_spec(name) is None:
            raise _refused(f"it is checked with {name}: pip install 'headrace[{extra}]'")
    try:
        done = subprocess.run(
            # -P: a folder named `policy` in the working directory must not be imported instead
            [sys.executable, "-P", "-m", __name__],
            input=json.dumps(spec.to_json()).encode() + b"\n" + model,
            capture_output=True,
            timeout=_WAIT,
            check=False,
            env=own_environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(f"expected to be checked within {_WAIT:g} s, got no result") from error
    if done.returncode == 1 and done.stdout:
        raise _refused(done.stdout.decode(errors="replace"))
    if done.returncode in (-signal.SIGPROF, -signal.SIGXCPU):
        raise _refused(
            f"expected to be loaded and to act within {RUN_SECONDS:g} s of processor time, got more"
        )
    if done.returncode:
        raise _refused(
            f"expected to be checked within {MEMORY // 2**20:,} MB of memory, but the process "
            f"ended with status {done.returncode}"
        )


def main() -> int:
    """Check the file on stdin; print what is wrong with it, and return the exit status."""
    import resource

    spec = PolicySpec.from_json(json.loads(sys.stdin.buffer.readline()))
    model = sys.stdin.buffer.read(MAX_FILE + 1)
    memory = MEMORY + 4 * len(model)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # the system ends the process, in the middle of a call if need be
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    try:
        require_allowed(model)
        signal.setitimer(signal.ITIMER_PROF, RUN_SECONDS)
        _require_acts(spec, model)
    except MemoryError:
        print(f"expected to be checked within {memory // 2**20:,} MB of memory, got more", end="")
        return 1
    except Exception as error:  # whatever the libraries raise is a reason to refuse the file
        found = str(error).removeprefix(f"{ONNX_FILE}: ") or repr(error)
        print(found[:_LONGEST], end="")
        return 1
    return 0


def require_allowed(model: bytes) -> None:
    """Raise ValueError unless the file's graph is allowed. It is parsed, and not run."""
    import onnx

    try:
        found = onnx.load_model_from_string(model)
    except Exception as error:  # of protobuf
        raise ValueError(f"expected a whole ONNX file, got other bytes: {error}") from error
    graph = found.graph
    if not graph.node or not graph.input or not graph.output:
        raise ValueError("expected a whole ONNX file, got one without nodes, inputs or outputs")
    if len(graph.node) > MAX_NODES:
        raise ValueError(f"expected at most {MAX_NODES:,} nodes, got {len(graph.node):,}")
    opsets = {one.domain: one.version for one in found.opset_import}
    if set(opsets) - {"", "ai.onnx"} or len(found.opset_import) != 1:
        raise ValueError(f"expected operators of ONNX alone, got the domains {sorted(opsets)!r}")
    (opset,) = opsets.values()
    if opset not in OPSETS or found.ir_version not in IR_VERSIONS:
        raise ValueError(
            f"expected an opset of {OPSETS[0]} to {OPSETS[-1]} and an IR version of "
            f"{IR_VERSIONS[0]} to {IR_VERSIONS[-1]}, got {opset} and {found.ir_version}"
        )
    if found.functions or found.training_info or graph.sparse_initializer:
        raise ValueError("expected no functions, training or sparse tensors, got some")
    for tensor in graph.initializer:
        _require_inside(tensor)
    for node in graph.node:
        _require_operator(node)
    onnx.checker.check_model(found)
    for batch in BATCHES:
        _require_bounded(found, batch)


def _require_operator(node: Any) -> None:
    import onnx

    name = f"node {node.name or node.output[:1]!r:.80}"
    if node.domain not in ("", "ai.onnx") or node.op_type not in _OPERATORS:
        got = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise ValueError(f"{name}: expected an operator on the gate's list, got {got!r:.80}")
    plain = onnx.AttributeProto
    values = (plain.FLOAT, plain.INT, plain.STRING, plain.FLOATS, plain.INTS, plain.STRINGS)
    for attribute in node.attribute:
        if attribute.type == plain.TENSOR:
            _require_inside(attribute.t)
        elif attribute.type not in values:
            raise ValueError(f"{name}: expected no subgraph, got {attribute.name!r:.80}")


def _require_inside(tensor: Any) -> None:
    """Raise ValueError for a tensor whose data is in another file."""
    if tensor.data_location or tensor.external_data:
        raise ValueError(f"tensor {tensor.name!r:.80}: expected its data in the file itself")


def _require_bounded(found: Any, batch: int) -> None:
    """Raise ValueError unless all shapes are known for a batch, and small enough."""
    import onnx

    constants = {tensor.name for tensor in found.graph.initializer}
    for given in found.graph.input:
        if given.name in constants:  # as older exporters list them
            continue
        dims = given.type.tensor_type.shape.dim
        if not dims:
            raise ValueError(f"input {given.name!r:.80}: expected a batch size, got a scalar")
        dims[0].ClearField("dim_param")
        dims[0].dim_value = batch
    for given in found.graph.output:  # those of the file may be names, which inference keeps
        given.type.tensor_type.ClearField("shape")
    del found.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(
        found, check_type=True, strict_mode=True, data_prop=True
    )
    graph, sizes = inferred.graph, {}
    for one in (*graph.value_info, *graph.output):
        shape = one.type.tensor_type.shape
        if one.type.tensor_type.HasField("shape"):
            known = [dim.HasField("dim_value") and dim.dim_value >= 0 for dim in shape.dim]
            sizes[one.name] = math.prod(dim.dim_value for dim in shape.dim) if all(known) else None
    for node in graph.node:
        for name in filter(None, node.output):
            where, size = f"result {name!r:.80} of {node.op_type}", sizes.get(name)
            if size is None:
                raise ValueError(f"{where}: expected a shape that follows from the batch size")
            if size > MAX_NUMBERS * batch:
                raise ValueError(
                    f"{where}: expected at most {MAX_NUMBERS:,} numbers for one observation, got "
                    f"{size // batch:,}"
                )


def _require_acts(spec: PolicySpec, model: bytes) -> None:
    """Raise ValueError unless the file acts on plausible observations, on each for itself."""
    policy = NumpyPolicy(spec, {ONNX_FILE: np.frombuffer(model, np.uint8)})
    policy.require_finite()
    flat = policy.plausible()
    alone = np.concatenate([policy.dist_inputs(row[None]) for row in flat])
    rows = np.random.default_rng(0).integers(len(flat), size=sum(BATCHES))
    together = policy.dist_inputs(flat[rows])
    if not np.allclose(together, alone[rows], rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ValueError(
            "expected outputs that depend on their own observation alone, got others for a batch "
            "than for its rows: is it in training mode?"
        )


if __name__ == "__main__":
    sys.exit(main())
