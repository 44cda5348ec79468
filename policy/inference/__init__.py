"""Acting with numpy: the policy's spec, preprocessing, filters, distributions.

Clients and collectors act with it, so it loads neither torch nor Arrow. Imports spaces,
declarations and published weights. `weight_store` refuses weights that numpy cannot act with.
"""

__all__ = [
    "action_layout",
    "action_rule",
    "distributions",
    "filters",
    "finite",
    "numpy_policy",
    "preprocessors",
    "spec",
    "weight_store",
]
