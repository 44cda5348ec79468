"""Off-policy estimators: pure."""
