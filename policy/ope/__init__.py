"""Off-policy evaluation: estimators, intervals, value models, and the judgement on them.

Arrays in, estimates out: no files, no clock. Imports numpy and scipy, and nothing else of Headrace.
Each estimator names its paper and equation.
"""

__all__ = [
    "alpha_budget",
    "arms",
    "comparison",
    "cross_fitting",
    "diagnostics",
    "episodes",
    "estimators",
    "intervals",
    "judgement",
    "margins",
    "propensities",
    "repeats",
    "reward_cap",
    "reward_ends",
    "value_models",
]
