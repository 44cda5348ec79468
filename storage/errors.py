"""What can go wrong at rest.

    StorageError
    ├── FolderMoved              a folder in use is not at its path any more: stop
    ├── JournalError
    │   ├── JournalLocked        another process holds the journal
    │   │   └── JournalLookedAt  others only look at it, and will be done soon
    │   ├── JournalFull          the disk is full: rolled back, the journal stays usable
    │   └── JournalFailed        a write or a sync failed: stop acknowledging, exit, replay
    └── WeightStoreError
        ├── WeightsNotFound      no such candidate or version
        ├── WeightsDamaged       a digest or a document does not fit: do not act with it
        ├── WeightsRefused       weights that their spec cannot act with: never kept, never live
        ├── PolicyPinned         a rollback holds until it is ended by name
        ├── GenerationConflict   somebody else changed what is live in between
        └── LeaseHeld            another follower trains this policy; the text names it

Bad values (`SpaceError`, `EpisodeError`, `ValueError`) are the caller's and stand beside the types
that they judge.
"""

from __future__ import annotations

__all__ = [
    "FolderMoved",
    "GenerationConflict",
    "JournalError",
    "JournalFailed",
    "JournalFull",
    "JournalLocked",
    "JournalLookedAt",
    "LeaseHeld",
    "PolicyPinned",
    "StorageError",
    "WeightStoreError",
    "WeightsDamaged",
    "WeightsNotFound",
    "WeightsRefused",
]


class StorageError(Exception):
    """The root of everything that this package raises about files."""


class FolderMoved(StorageError):
    """A folder in use was moved, unmounted or replaced: its path leads elsewhere."""


class JournalError(StorageError):
    """The journal cannot do what was asked."""


class JournalLocked(JournalError):
    """Another process has this journal open; the text names it."""


class JournalLookedAt(JournalLocked):
    """Others look at this journal, as `verify` does while it copies it: try again."""


class JournalFull(JournalError):
    """No space left: the transaction was rolled back, and a later one may succeed."""


class JournalFailed(JournalError):
    """A write or a sync failed, so nobody knows what is on disk. Only a new open may go on."""


class WeightStoreError(StorageError):
    """The weight store cannot do what was asked."""


class WeightsNotFound(WeightStoreError):
    """There is no such candidate, version or live pointer."""


class WeightsDamaged(WeightStoreError):
    """Bytes do not match their digest, or a document its format."""


class WeightsRefused(WeightStoreError, ValueError):
    """Weights that nobody could act with; the text names the tensor, or what was not finite."""


class PolicyPinned(WeightStoreError):
    """A rollback holds: nothing is published before `headrace resume` ends it by name."""


class GenerationConflict(WeightStoreError):
    """The live pointer has another generation than the caller expected."""


class LeaseHeld(WeightStoreError):
    """Another follower trains this policy, or has taken over; the text names it."""
