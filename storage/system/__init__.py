"""Functions of the operating system: locks, atomic files, signals, faster starts.

Imports nothing else of Headrace, except the error `FolderMoved`.
"""

__all__ = ["backoff", "files", "forks", "memory", "pinned_folders", "process", "startup"]
