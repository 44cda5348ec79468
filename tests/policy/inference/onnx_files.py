"""ONNX files: sound ones, and those that the gate must refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FEATURES, OUTPUTS = 4, 3
Made = Callable[[], bytes]


def node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [output], **attributes)


def constant(name: str, values: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values), name)


def model(
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[onnx.TensorProto] = (),
    *,
    outputs: int = OUTPUTS,
    opset: int = 18,
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    output: str = "dist_inputs",
) -> onnx.ModelProto:
    """A model of the nodes, the last of which gives the output."""
    given = [tensor("obs", FEATURES)] if inputs is None else list(inputs)
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", outputs])
    graph = helper.make_graph(list(nodes), "graph", given, [result], list(constants))
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def tensor(name: str, *dims: int, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ["batch", *dims])


def linear(outputs: int = OUTPUTS, scale: float = 1.0, seed: int = 0) -> onnx.ModelProto:
    """outputs = obs @ weight."""
    weight = np.random.default_rng(seed).normal(size=(FEATURES, outputs)) * scale
    nodes = [node("MatMul", ("obs", "weight"), "dist_inputs")]
    return model(nodes, [constant("weight", weight.astype(np.float32))], outputs=outputs)


def weights_of(found: onnx.ModelProto | bytes) -> dict[str, Any]:
    data = found if isinstance(found, bytes) else found.SerializeToString()
    return {"model.onnx": np.frombuffer(data, np.uint8)}


def _after(*before: onnx.NodeProto, source: str = "x", **more: Any) -> onnx.ModelProto:
    """A model that does something, then adds up its result and an honest output."""
    found = linear()
    honest = node("MatMul", ("obs", "weight"), "honest")
    added = [
        node("ReduceSum", (source,), "sum", keepdims=0),
        node("Add", ("honest", "sum"), "dist_inputs"),
    ]
    constants = [*found.graph.initializer, *more.pop("constants", ())]
    return model([*before, honest, *added], constants, **more)


def _endless() -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", ("go",), "goes"), node("Identity", ("x",), "y")],
        "body",
        [
            info("i", TensorProto.INT64, []),
            info("go", TensorProto.BOOL, []),
            info("x", TensorProto.FLOAT, ["batch", FEATURES]),
        ],
        [
            info("goes", TensorProto.BOOL, []),
            info("y", TensorProto.FLOAT, ["batch", FEATURES]),
        ],
    )
    loop = node("Loop", ("many", "yes", "obs"), "x", body=body)
    many, yes = constant("many", np.int64(2**62)), constant("yes", np.True_)
    return _after(loop, constants=[many, yes])


def _outside(initializer: bool) -> onnx.ModelProto:
    found = linear()
    (weight,) = found.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="/etc/passwd")
    if not initializer:
        found.graph.node.insert(0, helper.make_node("Constant", [], ["weight"], value=weight))
        del found.graph.initializer[:]
    return found


def _function() -> onnx.ModelProto:
    found = linear()
    body = [node("Abs", ("x",), "y")]
    opsets = [helper.make_opsetid("", 18)]
    found.functions.append(helper.make_function("", "Own", ["x"], ["y"], body, opsets))
    return found


def _other_domain() -> onnx.ModelProto:
    found = linear()
    found.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return found


def _opset(number: int) -> onnx.ModelProto:
    found = linear()
    found.opset_import[0].version = number
    return found


def _shapes() -> onnx.ModelProto:
    """The size of a result follows from what is observed."""
    cast = node("Cast", ("obs",), "whole", to=TensorProto.INT64)
    most = node("ReduceMax", ("whole",), "most", keepdims=0)
    vector = node("Reshape", ("most", "one"), "size")
    return _after(
        cast,
        most,
        vector,
        node("ConstantOfShape", ("size",), "x"),
        constants=[constant("one", [1])],
    )


def _many() -> onnx.ModelProto:
    found = linear()
    found.graph.node.extend([node("Relu", ("obs",), "x")] * 200_000)
    return found


def _tile() -> onnx.ModelProto:
    return _after(node("Tile", ("obs", "by"), "x"), constants=[constant("by", [1, 2**28])])


def _bomb() -> onnx.ModelProto:
    filled = node("ConstantOfShape", ("size",), "x")
    return _after(filled, constants=[constant("size", [2**20, 2**20])])


def batch_size(*then: onnx.NodeProto, **more: Any) -> onnx.ModelProto:
    """Nodes that compute `x` from the batch size (1,)."""
    constants = [constant("zero", [0]), constant("one", [1]), *more.pop("constants", ())]
    begin = [node("Shape", ("obs",), "shape"), node("Slice", ("shape", "zero", "one"), "b1")]
    return _after(*begin, *then, constants=constants, **more)


def _batch_bomb() -> onnx.ModelProto:
    """Small for few observations, and the seventh power of many."""
    powers = [node("Mul", (f"b{i}", "b1"), f"b{i + 1}") for i in range(1, 7)]
    return batch_size(*powers, node("ConstantOfShape", ("b7",), "x"))


HOSTILE: dict[str, tuple[Made, str]] = {
    "endless loop": (lambda: _endless().SerializeToString(), "expected an operator.*'Loop'"),
    "200,000 nodes": (lambda: _many().SerializeToString(), "at most 10,000 nodes, got 200,001"),
    "random": (
        lambda: _after(node("RandomNormalLike", ("obs",), "x")).SerializeToString(),
        "expected an operator.*'RandomNormalLike'",
    ),
    "tile bomb": (lambda: _tile().SerializeToString(), "at most 4,194,304 numbers .*, got 1,073,"),
    "constant bomb": (lambda: _bomb().SerializeToString(), "at most 4,194,304 numbers"),
    "batch bomb": (
        lambda: _batch_bomb().SerializeToString(),
        "at most 4,194,304 numbers .*, got 16,777,216",
    ),
    "sizes of observations": (
        lambda: _shapes().SerializeToString(),
        "result 'x' of ConstantOfShape: expected a shape that follows",
    ),
    "/etc/passwd": (lambda: _outside(True).SerializeToString(), "expected its data in the file"),
    "/etc/passwd in a node": (
        lambda: _outside(False).SerializeToString(),
        "expected its data in the file",
    ),
    "function": (lambda: _function().SerializeToString(), "expected no functions"),
    "other domain": (lambda: _other_domain().SerializeToString(), r"domains \['', 'com.microsoft'"),
    "opset of the future": (
        lambda: _opset(22).SerializeToString(),
        "expected an opset of 11 to 21 .*, got 22",
    ),
    "truncated": (
        lambda: linear().SerializeToString()[:-20],
        "expected a whole ONNX file",
    ),
    "nothing": (lambda: b"\n", "expected a whole ONNX file"),
    "text": (lambda: b"import os; os.remove('x')", "expected a whole ONNX file"),
}
"""Name -> (the file, what its refusal says)."""


def slow() -> bytes:
    """Sound shapes, and minutes of work for one observation."""
    size = 2**11
    fill = helper.make_tensor("value", TensorProto.FLOAT, [1], [1e-4])
    begin = [
        node("ReduceSum", ("obs",), "total", keepdims=0),
        node("ConstantOfShape", ("size",), "ones", value=fill),
        node("Mul", ("ones", "total"), "r0"),
    ]
    turns = [node("MatMul", (f"r{i}", f"r{i}"), f"r{i + 1}") for i in range(1000)]
    made = _after(*begin, *turns, source="r1000", constants=[constant("size", [size, size])])
    return bytes(made.SerializeToString())
