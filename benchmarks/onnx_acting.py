"""Acting by an ONNX file against its bare run in onnxruntime, and against the same layers in numpy.

Processor time of one thread, the best of several rounds. The baseline of the first figures is one
and a half bare runs and 10 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnxruntime

from benchmarks.report import Figure
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ONNX, ModuleSpec, PolicySpec
from storage.spaces.descriptors import Box, Discrete, Space
from tests.policy.inference.onnx_files import constant, model, node, tensor, weights_of

ROUNDS, CALLS = 9, 1000
LAYERS = ModuleSpec("mlp", (64, 64), value_head=False, state_std=True)
BOX = Box((2,), low=-1.0, high=1.0)
HEADS: dict[str, tuple[Space, str | None]] = {
    "3 options": (Discrete(3), None),
    "Gaussian, 2 elements": (BOX, None),
    "squashed, 2 elements": (BOX, "squashed_gaussian"),
}
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
SMALL = ((8, 3, 2), (16, 3, 1))


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Processor time of one call."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        rounds.append(time.thread_time() - begin)
    return min(rounds) / calls * 1e6


def perceptron(action: Space, head: str | None) -> tuple[NumpyPolicy, onnx.ModelProto]:
    """The same two hidden layers in numpy and in a file."""
    spec, rng = PolicySpec(Box((8,)), action, LAYERS, head), np.random.default_rng(0)
    shapes = spec.weight_shapes()
    weights = {one: rng.normal(size=shapes[one]).astype(np.float32) / 10 for one in shapes}
    nodes, constants = [], [constant(one, weights[one]) for one in weights]
    for at, (source, out) in enumerate((("obs", "h0"), ("t0", "h1"), ("t1", "dist_inputs"))):
        inputs = (source, f"pi.{2 * at}.weight", f"pi.{2 * at}.bias")
        nodes.append(node("Gemm", inputs, out, transB=1))
        if out != "dist_inputs":
            nodes.append(node("Tanh", (out,), f"t{at}"))
    made = model(nodes, constants, inputs=[tensor("obs", 8)], outputs=spec.outputs)
    return NumpyPolicy(spec, weights), made


def images(
    size: int, channels: int, layers: Sequence[tuple[int, int, int]], hidden: int
) -> onnx.ModelProto:
    """Convolutions (filters, kernel, stride) over (size, size, channels), then two layers."""
    rng, nodes, constants = np.random.default_rng(0), [], []
    given = tensor("obs", size, size, channels)

    def weight(name: str, *shape: int) -> str:
        constants.append(constant(name, rng.normal(size=shape).astype(np.float32) / 20))
        return name

    nodes.append(node("Transpose", ("obs",), "r", perm=[0, 3, 1, 2]))
    source = "r"
    for at, (filters, kernel, stride) in enumerate(layers):
        inputs = (source, weight(f"k{at}", filters, channels, kernel, kernel))
        nodes.append(node("Conv", inputs, f"c{at}", strides=[stride, stride]))
        nodes.append(node("Relu", (f"c{at}",), f"r{at}"))
        source, channels, size = f"r{at}", filters, (size - kernel) // stride + 1
    nodes += [
        node("Flatten", (source,), "flat"),
        node("MatMul", ("flat", weight("w", channels * size * size, hidden)), "h"),
        node("Relu", ("h",), "hidden"),
        node("MatMul", ("hidden", weight("v", hidden, 6)), "dist_inputs"),
    ]
    return model(nodes, constants, inputs=[given], outputs=6)


def compared(name: str, policy: NumpyPolicy, made: onnx.ModelProto, calls: int = CALLS) -> Figure:
    """What acting costs, against the limit that follows from the bare run."""
    rng, shape = np.random.default_rng(0), policy.spec.flattener.leaves[0].shape
    obs = rng.normal(size=shape).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    bare = microseconds(lambda: session.run(None, {"obs": obs[None]}), calls)
    return Figure(
        name=f"acting by ONNX: {name}",
        value=microseconds(lambda: policy.act_one(obs, rng), calls),
        unit="us",
        baseline_name="1.5 bare runs + 10 us",
        baseline_value=1.5 * bare + 10,
        aim="<= 1",
    )


def run() -> list[Figure]:
    figures = []
    for name, (action, head) in HEADS.items():
        twin, made = perceptron(action, head)
        policy = NumpyPolicy(PolicySpec(Box((8,)), action, ONNX, head), weights_of(made))
        own = compared(name, policy, made)
        obs, rng = np.ones(8, np.float32), np.random.default_rng(0)
        numpy = microseconds(partial(twin.act_one, obs, rng))
        name = "the same layers in numpy"
        figures += [own, replace(own, baseline_name=name, baseline_value=numpy, aim="")]
    for name, size, channels, layers, hidden in (
        ("images of 12 x 12 x 3", 12, 3, SMALL, 32),
        ("Nature's network", 84, 4, NATURE, 512),
    ):
        made = images(size, channels, layers, hidden)
        spec = PolicySpec(Box((size, size, channels)), Discrete(6), ONNX)
        figures.append(compared(name, NumpyPolicy(spec, weights_of(made)), made, CALLS // 5))
    return figures
