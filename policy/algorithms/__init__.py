"""Update rules: one file per algorithm, with its config, its loss and its update.

Imports networks, batches and value models. `Learner` also imports the reader's ledger, which is
part of its checkpoint; `TrainablePolicy` accepts gymnasium's spaces. Imports no shards,
environments or samplers, and nothing of the jobs (`data`, `training`, `judging`). A new algorithm
is a file of its own, however small (`bc`), and a line of `by_name`; borrowed ones are classes of
`torchrl`.
"""

__all__ = [
    "bandit",
    "base",
    "by_name",
    "conformance",
    "cql",
    "data_parallel",
    "learner",
    "ppo",
    "settings",
    "torchrl",
    "trainable_policy",
]
