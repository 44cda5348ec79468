"""Batches from environments: samplers, callbacks, metrics, postprocessing.

Knows environments, batches, and how a policy acts; of updates only the advantages of PPO. Nothing
of workers.
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
