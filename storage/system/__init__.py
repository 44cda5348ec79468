"""Functions of the operating system: locks, atomic files, signals, faster starts; format numbers;
times of command lines.

Imports nothing else of Headrace, except the errors `FolderMoved` and `NewerFormat`.
"""

__all__ = [
    "backoff",
    "files",
    "forks",
    "formats",
    "memory",
    "periods",
    "pinned_folders",
    "process",
    "startup",
]
