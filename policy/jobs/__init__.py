"""Jobs of a training schedule: freeze, train, evaluate, publish, follow.

Each is safe to run again. Knows the shards, the learner and the weight store; nothing of HTTP.
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
    "train_once",
]
