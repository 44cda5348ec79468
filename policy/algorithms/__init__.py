"""Update rules: one readable file an algorithm, with its config, its loss and its update.

Knows networks and batches; nothing of shards, jobs or environments.
"""

__all__ = ["bandit", "base", "data_parallel", "learner", "passes", "ppo", "trainable_policy"]
