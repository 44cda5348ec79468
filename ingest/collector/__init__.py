"""The collector without HTTP: group commit, sealing, recovery, live policies.

Connects the state machine of `ingest.episodes` to the journal and the shard writer. Loads neither
pandas nor torch. `slices` is separate from the routes because it divides a batch for the journal.
"""

__all__ = [
    "address_file",
    "adoption",
    "collector",
    "flow_control",
    "flow_control_file",
    "journal_report",
    "live_policies",
    "part_feed",
    "quotas",
    "recovery",
    "slices",
    "statistics",
    "stores",
    "trainer_watch",
]
