"""The collector as a process: routes, metrics, logs, signals, supervision.

The only place where every part of the edge meets.
"""

__all__ = ["collect", "declare", "listening", "logs", "process"]
