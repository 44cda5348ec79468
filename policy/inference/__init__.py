"""Acting with numpy alone: the policy's spec, preprocessing, filters, distributions.

What a thin client and a collector act with, so it loads neither torch nor Arrow.
"""

__all__ = [
    "action_layout",
    "action_rule",
    "distributions",
    "filters",
    "numpy_policy",
    "preprocessors",
    "spec",
    "weight_store",
]
