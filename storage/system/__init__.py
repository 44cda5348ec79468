"""What we need of the operating system: locks, atomic files, signals, faster starts.

Knows nothing of ours but the error `FolderMoved`.
"""

__all__ = ["backoff", "files", "memory", "pinned_folders", "process", "startup"]
