"""Judging candidates by held-out episodes or in a canary, and publishing through the gate.

Imports `policy.data`, the estimators and the weight store; nothing that trains or speaks HTTP.
`scratch` is separate from `evaluate` because it handles temporary files and nothing of a judgement,
`tag_repeats` because it knows nothing of the episodes but their tags, and `scorecard` because it
judges all policies of a root and decides nothing.
"""

__all__ = ["canary", "gate", "log_review", "scorecard", "settings"]
