"""A collector inside a trainer's process, and environments that call the worker themselves.

Only this folder of `ingest` both serves clients and feeds a learner.

`external_multi_agent_env` is apart: a public class, which has spaces and policies by agent.
"""

__all__ = ["external_env", "external_multi_agent_env", "local_publisher", "policy_server_input"]
