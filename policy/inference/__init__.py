"""Acting with numpy: the policy's spec, preprocessing, filters, distributions.

Clients and collectors act with it, so it loads neither torch nor Arrow. Imports spaces,
declarations and published weights. `weight_store` refuses weights that cannot act. A network that
is an ONNX file is run by onnxruntime (`onnx_network`), once `onnx_gate` has passed it.
"""

__all__ = [
    "action_layout",
    "action_rule",
    "distributions",
    "filters",
    "finite",
    "numpy_policy",
    "onnx_network",
    "own_models",
    "preprocessors",
    "spec",
    "weight_store",
]
