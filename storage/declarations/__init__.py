"""Declarations of policies: spaces, time windows, redaction, and the files that contain them.

Imports spaces, file functions and the name of the default policy, but no journals or shards.
`policy_files` is separate so that `declaration` opens no files, and `mapping_functions` because it
inspects the user's functions and knows no declaration. `history_files` is separate because the
history itself is pure.
"""

__all__ = [
    "declaration",
    "dropped_steps",
    "held_policies",
    "history_files",
    "late_rewards",
    "mapping_functions",
    "policy_files",
    "redaction_rules",
    "tombstones",
]
