"""Changes to stored shards: plans, their application, and the commands that make plans.

A plan says which shards become which, and nothing else changes shards that are recorded. `search`
looks for what should be gone. May import everything below it in `storage`, readers and `verify`
among them. `background` is separate because only a child process of a collector runs it.
"""

__all__ = ["background", "compaction", "plans", "removal", "search"]
