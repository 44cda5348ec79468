"""Training from shards: a job on a frozen data set or a log, and a follower of a running collector.

Imports `policy.data`, the learner and the weight store; nothing that judges or speaks HTTP.
`replaying` is apart because it alone reads shards a second time.
"""

__all__ = ["settings", "train", "train_live"]
