"""Off-policy evaluation: estimators, intervals, value models, and the judgement on them.

Pure: arrays in, estimates out. Knows numpy and scipy, and nothing of ours. Each estimator names its
paper and equation.
"""

__all__ = [
    "arms",
    "comparison",
    "cross_fitting",
    "diagnostics",
    "episodes",
    "estimators",
    "intervals",
    "judgement",
    "value_models",
]
