"""Batches from environments: samplers, callbacks, metrics, postprocessing.

Knows environments and how a policy acts; nothing of updates or workers.
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
