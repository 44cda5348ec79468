"""Jobs of a training schedule: freeze, train, evaluate, publish, follow.

Each can be repeated safely. Imports shards, the learner and the weight store; nothing of HTTP.
`scratch` is separate from `evaluate` because it handles temporary files and nothing of a judgement.
"""

__all__ = [
    "canary",
    "freeze",
    "gate",
    "overview",
    "run_once",
    "train",
    "train_live",
]
