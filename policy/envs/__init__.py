"""Environments behind one interface, `BaseEnv`, and vectors of them stepped as columns.

Imports gymnasium, batches, and the preprocessors of `policy.inference` for nested observations, but
no networks and no learning.
"""

__all__ = ["base_env", "conformance", "env_context", "env_runner", "vector_env"]
