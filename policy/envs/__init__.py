"""Environments behind one protocol, `BaseEnv`, and copies of them stepped as columns.

Knows gymnasium, batches, and how `policy.inference` takes nested observations apart; nothing of
networks or learning.
"""

__all__ = ["base_env", "env_context", "env_runner", "vector_env"]
