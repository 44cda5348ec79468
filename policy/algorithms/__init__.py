"""Update rules: one readable file an algorithm, with its config, its loss and its update.

Knows networks, batches and value models. `Learner` also knows the reader's ledger, which is part of
its checkpoint; `TrainablePolicy` takes gymnasium's spaces. Nothing of shards, jobs, environments or
samplers.
"""

__all__ = ["bandit", "base", "cql", "data_parallel", "learner", "ppo", "trainable_policy"]
