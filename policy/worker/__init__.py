"""The rollout worker, and groups of workers on Ray.

Puts environments, samplers, policies and learning together behind the API of one class.
"""

__all__ = ["batch_io", "group", "rollout_worker"]
