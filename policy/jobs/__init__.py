"""Jobs of a training schedule: freeze, train, evaluate, publish, follow.

Each is safe to run again. Knows the shards, the learner and the weight store; nothing of HTTP.
`scratch` is apart from `evaluate`: temporary files, and nothing of a judgement.
"""

__all__ = [
    "canary",
    "decisions",
    "freeze",
    "gate",
    "overview",
    "report",
    "run_once",
    "train",
    "train_live",
]
