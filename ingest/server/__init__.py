"""The collector as a process: routes, metrics, logs, signals, supervision.

The only folder that imports all others of `ingest`. `memory` is separate because it watches a load
and serves nothing, `compacting` because it only starts a child process, and `seal_events` because
it only posts.
"""

__all__ = ["declare", "listening", "logs", "options", "process"]
