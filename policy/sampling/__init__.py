"""Batches from environments: samplers, callbacks, metrics, postprocessing.

Imports environments, batches and `policy.inference`; of the algorithms only `TrainablePolicy` and
PPO's advantages; no workers.
"""

__all__ = [
    "base_env_sampler",
    "callbacks",
    "episode",
    "fragment_buffers",
    "metrics",
    "postprocessing",
    "sampler",
    "vector_sampler",
]
