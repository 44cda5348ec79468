"""The collector as a process: routes, metrics, logs, signals, supervision.

The only folder that imports all others of `ingest`. `collect` is separate from `process` because it
parses a command line. `memory` is separate because only it configures the C library's allocator.
"""

__all__ = ["collect", "declare", "listening", "logs", "process"]
