"""Functions of the operating system: locks, atomic files, signals, faster starts; format numbers.

Imports nothing else of Headrace, except the errors `FolderMoved` and `NewerFormat`.
"""

__all__ = ["backoff", "files", "forks", "formats", "memory", "pinned_folders", "process", "startup"]
