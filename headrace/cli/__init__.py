"""The commands of the command line, one function each.

Loads what a command needs when it runs, so that `--help` loads neither torch nor Arrow.
"""

__all__ = ["collecting", "learning", "options", "publishing", "tokens"]
