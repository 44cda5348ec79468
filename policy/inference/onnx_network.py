"""An ONNX file as a policy's network, run by onnxruntime: the only module that imports it to act.

The first output of the file, or the one named `dist_inputs`, is (B, K) float32: the parameters of
the action distribution (policy.inference.action_layout). The batch size B is free. Each input is
the leaf of an observation with its name, or any name if the observation has only one leaf:

| leaf | input |
| --- | --- |
| any | float32 (B, *shape), or its numbers in a row: one-hot vectors of Discrete, MultiDiscrete |
| Discrete, MultiDiscrete | int64 (B,), (B, m): the numbers of the options, from 0 |

`action_mask` and `candidates` are leaves like others, and a file may do without them: options that
the mask forbids are never chosen anyway. An input named `flat` is the whole flat observation
(policy.inference.preprocessors). A file passes policy.inference.onnx_gate before it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from policy.inference.spec import ONNX_FILE, PolicySpec, SpecError
from storage.spaces.descriptors import Discrete, MultiDiscrete

if TYPE_CHECKING:
    from storage.spaces.leaves import Leaf

FlatArray = npt.NDArray[np.float32]
Input = Callable[[FlatArray], npt.NDArray[Any]]
"""An input of the file from flat observations (B, D)."""
MAX_FILE = 256 * 2**20
"""The largest size of a file in bytes."""
FLAT = "flat"
FLOATS, INDICES = "tensor(float)", "tensor(int64)"
BATCHES = (16, 4, 1)
"""The observations in a run: the gate tries all of these, and a large network's memory is bounded.
"""


class OnnxNetwork:
    """The network in a file. Any number of threads may use it; a run takes one thread.

    Raises SpecError without onnxruntime, for a file that it cannot load, and for inputs or outputs
    that do not fit the spec.
    """

    def __init__(self, spec: PolicySpec, model: bytes) -> None:
        self._session = _session(model)
        self._size = spec.outputs
        named = {one.name: one for one in self._session.get_outputs()}
        self._output = "dist_inputs" if "dist_inputs" in named else next(iter(named), "")
        self._require_outputs(spec, named)
        given = self._session.get_inputs()
        self._inputs = {
            one.name: input_of(spec, one.name, one.type, one.shape, only=len(given) == 1)
            for one in given
        }

    def outputs(self, flat: FlatArray) -> FlatArray:
        """(B, K) float32 for flat observations (B, D); NaN where the file cannot be run."""
        if len(flat) == 1:
            return self._run(flat)
        found = np.empty((len(flat), self._size), np.float32)
        at = 0
        for size in BATCHES:
            while len(flat) - at >= size:
                found[at : at + size] = self._run(flat[at : at + size])
                at += size
        return found

    def _run(self, flat: FlatArray) -> FlatArray:
        feeds = {name: made(flat) for name, made in self._inputs.items()}
        try:
            (found,) = self._session.run([self._output], feeds)
        except Exception:  # of onnxruntime, whose errors have no class in common
            if len(flat) == 1:
                return np.full((1, self._size), np.nan, np.float32)
            return np.concatenate([self._run(row[None]) for row in flat])
        if found.shape != (len(flat), self._size):
            raise SpecError(
                f"{ONNX_FILE}: output {self._output!r}: expected shape {(len(flat), self._size)}, "
                f"got {found.shape}"
            )
        return np.asarray(found, np.float32)

    def _require_outputs(self, spec: PolicySpec, named: Mapping[str, Any]) -> None:
        found = named.get(self._output)
        size = None if found is None or len(found.shape) != 2 else found.shape[1]
        if found is None or found.type != FLOATS or size != self._size:
            got = "none" if found is None else f"{found.type} {found.shape}"
            stds = spec.layout.log_stds
            what = "" if not stds else f", {stds} means and {stds} log standard deviations"
            if stds and size == spec.layout.head:
                got += ": without a deviation its actions have no density"
            raise SpecError(
                f"{ONNX_FILE}: output {self._output!r}: expected float32 (batch, {self._size})"
                f"{what}, got {got}"
            )


def onnx_bytes(weights: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """The bytes of a file among a version's weights. Raises ValueError for other weights."""
    found = weights.get(ONNX_FILE)
    if set(weights) != {ONNX_FILE} or found is None:
        raise ValueError(f"weights: expected {ONNX_FILE}, got {sorted(weights)!r:.200}")
    if found.dtype != np.uint8 or found.ndim != 1 or not 0 < found.size <= MAX_FILE:
        raise ValueError(
            f"weights: {ONNX_FILE}: expected 1 to {MAX_FILE:,} bytes as uint8, got {found.dtype} "
            f"{found.shape}"
        )
    return found


def _session(model: bytes) -> Any:
    try:
        import onnxruntime  # noqa: PLC0415  an optional extra
    except ModuleNotFoundError as error:
        raise SpecError(
            f"{ONNX_FILE}: this policy acts by onnxruntime, which is not installed: pip install "
            "'headrace[onnx]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = False  # it keeps what the largest batch needed
    options.log_severity_level = 4  # errors are raised, and told there
    # not onnxruntime's own format, which the gate cannot read: one file can be both
    options.add_session_config_entry("session.load_model_format", "ONNX")
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime, whose errors have no class in common
        raise SpecError(
            f"{ONNX_FILE}: onnxruntime {onnxruntime.__version__} cannot load it: {error!s:.300}"
        ) from error


def input_of(
    spec: PolicySpec, name: str, kind: str, dims: Sequence[int | str], *, only: bool
) -> Input:
    """How an input of onnxruntime's type `kind` is made; `only`: there is no other beside it.

    Raises SpecError if it is none of an observation's.
    """
    flattener = spec.flattener
    leaves = zip(flattener.leaves, flattener.places, strict=True)
    named = {leaf.path: (leaf, place) for leaf, place in leaves}
    shape = list(dims)
    where = f"{ONNX_FILE}: input {name!r}"
    if not shape or isinstance(shape[0], int):
        raise SpecError(f"{where}: expected a batch size that is free, got shape {shape}")
    leaf, place = None, slice(0, flattener.size)
    if only and len(named) == 1:
        ((leaf, place),) = named.values()
    elif name in named:
        leaf, place = named[name]
    elif name != FLAT:
        raise SpecError(
            f"{where}: expected {FLAT!r} or a leaf of the observation, one of {sorted(named)}"
        )
    size = place.stop - place.start
    fitting = [[size]]
    if leaf is not None and isinstance(leaf.space, (Discrete, MultiDiscrete)):
        if kind == INDICES and shape[1:] == list(leaf.shape):
            space = leaf.space
            return _indices(leaf, (space.n,) if isinstance(space, Discrete) else space.nvec, place)
    elif leaf is not None:
        fitting.insert(0, list(leaf.shape))
    if kind != FLOATS or shape[1:] not in fitting:
        shapes = " or ".join(dict.fromkeys(str(["batch", *one]) for one in fitting))
        raise SpecError(f"{where}: expected float32 of shape {shapes}, got {kind} of {shape}")
    inner = [int(size) for size in shape[1:]]
    return lambda flat: flat[:, place].reshape(len(flat), *inner)


def _indices(leaf: Leaf, sizes: Sequence[int], place: slice) -> Input:
    """The options' numbers, from their one-hot vectors."""
    ends = place.start + np.cumsum(sizes)
    blocks = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]

    def made(flat: FlatArray) -> npt.NDArray[Any]:
        found = np.stack([flat[:, block].argmax(axis=1) for block in blocks], axis=1)
        return np.asarray(found.reshape(len(flat), *leaf.shape), np.int64)

    return made
