"""Acting with numpy alone: the policy's spec, preprocessing, filters, distributions.

What a thin client and a collector act with, so it loads neither torch nor Arrow. Knows spaces,
declarations and published weights, whose store (`weight_store`) refuses what numpy cannot act with.
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
