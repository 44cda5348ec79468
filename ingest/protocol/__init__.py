"""Wire protocol v1: messages, errors, names of agents, weights as they travel.

Pure: time is an argument, and nothing here touches a file, a thread or a socket. Loads msgspec and
numpy alone.
"""

__all__ = ["agent_names", "errors", "messages", "weights"]
