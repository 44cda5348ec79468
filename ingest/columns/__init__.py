"""The rules for columns of steps, which an import's client and the bulk route share.

They find invalid rows with masks; each side says where a row is from. Arrow is loaded on first use.
"""

__all__ = ["arrow_kinds", "faults", "leaf_columns", "step_numbers"]
