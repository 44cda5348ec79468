"""The commands of the command line, one function each.

May import every folder, because the commands put them together. Each command imports what it needs
when it runs, so `--help` loads neither torch nor Arrow, but for `train` and `up`, which list the
settings of algorithms. A module is a group of commands, even if the group is one command
(`exporting`, `reporting`, `maintaining`).
"""

__all__ = [
    "canaries",
    "collecting",
    "declared",
    "exporting",
    "importing",
    "learning",
    "maintaining",
    "options",
    "publishing",
    "reporting",
    "settings",
    "tokens",
]
