"""The collector as a process: routes, metrics, logs, signals, supervision.

The only place where every part of the edge meets. `collect` is apart from `process`: it
reads a command line, which `process` knows nothing of. `memory` is apart because it alone speaks
of the C library's allocator.
"""

__all__ = ["collect", "declare", "listening", "logs", "process"]
