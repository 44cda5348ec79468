"""A collector inside a trainer's process, and environments that call the worker themselves.

The only folder of `ingest` that both serves clients and feeds a learner.
"""

__all__ = ["external_env", "external_multi_agent_env", "policy_server_input"]
