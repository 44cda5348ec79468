"""A collector inside a trainer's process, and environments that call us.

The only folder of the edge that both serves clients and feeds a learner.
"""

__all__ = ["external_env", "external_multi_agent_env", "policy_server_input"]
