"""Wire protocol v1: messages, errors, names of agents, the weights message.

No files, threads, sockets or clocks. Imports only msgspec and numpy.
"""

__all__ = ["agent_names", "errors", "messages", "weights"]
