"""Off-policy evaluation: estimators, intervals, value models.

Pure: arrays in, estimates out. Each estimator names its paper and equation.
"""

__all__ = ["cross_fitting", "estimators", "value_models"]
