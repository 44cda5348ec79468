"""The commands of the command line, one function each.

May know every folder, for it is where they are put together. Each command loads what it needs when
it runs, so that `--help` loads neither torch nor Arrow. A module is a group of commands, also where
the group is one command (`reporting`).
"""

__all__ = [
    "canaries",
    "collecting",
    "importing",
    "learning",
    "options",
    "publishing",
    "reporting",
    "tokens",
]
