"""What is declared of a policy: its spaces, windows, redaction, and the files that say so.

Knows spaces, files, and the name of the default policy; nothing of journals or shards.
"""

__all__ = [
    "declaration",
    "dropped_steps",
    "held_policies",
    "mapping_functions",
    "policy_files",
    "redaction_rules",
]
