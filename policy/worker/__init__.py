"""The rollout worker, and groups of workers on Ray.

Puts environments, samplers, policies, learning and estimates together behind the API of one class.
Knows the interfaces of readers and writers, not shards; nothing of jobs.
"""

__all__ = ["batch_io", "group", "rollout_worker"]
