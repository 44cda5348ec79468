"""Environments behind one protocol, `BaseEnv`, and copies of them stepped as columns.

Knows gymnasium; nothing of policies or learning.
"""

__all__ = ["base_env", "env_context", "env_runner", "vector_env"]
