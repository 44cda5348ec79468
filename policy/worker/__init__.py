"""The rollout worker, and groups of workers on Ray.

One class, `RolloutWorker`, combines environments, samplers, policies, updates and estimates.
Imports the interfaces of readers and writers, but no shards and no jobs (`data`,
`training`, `judging`).
"""

__all__ = ["batch_io", "group", "rollout_worker"]
