"""Published weights: candidates, immutable versions, the pointer to the live version, decisions.

Imports objects, declarations, and `experience.range_set` for lineages. Weights are arrays by name
here; this package does not know the networks that they belong to.
"""

__all__ = [
    "decisions",
    "files",
    "folds",
    "lease",
    "lineage",
    "manifest",
    "off_chain",
    "served",
    "store",
]
