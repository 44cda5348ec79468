"""The collector as a process: routes, metrics, logs, signals, supervision.

The only folder that imports all others of `ingest`. `memory` is separate because it watches a load
and serves nothing, and `compacting` because it only starts a child process.
"""

__all__ = ["declare", "listening", "logs", "options", "process"]
