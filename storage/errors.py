"""Errors of files.

    StorageError
    ├── FolderMoved              a folder in use is no longer at its path: stop
    ├── JournalError
    │   ├── JournalLocked        another process holds the journal
    │   │   └── JournalLookedAt  other processes read it, as `verify` does: try again
    │   ├── JournalBehind        shards are later: run `headrace adopt`
    │   ├── JournalFull          the disk is full: rolled back, the journal stays usable
    │   └── JournalFailed        a write or a sync failed: stop acknowledging, exit, replay
    ├── NewerFormat              a later release wrote this: use that one
    ├── ObjectError
    │   ├── ObjectNotFound       no object has this name (FileNotFoundError)
    │   ├── ObjectExists         the name is taken (FileExistsError)
    │   ├── ObjectChanged        another writer was first
    │   └── ObjectUnusable       something else has the name, or it is too long (OSError)
    ├── NothingYet               no data, candidate or live version so far: try again later
    └── WeightStoreError
        ├── WeightsNotFound      no such candidate or version
        ├── WeightsDamaged       a digest does not match, or a document cannot be read
        ├── WeightsRefused       weights that their spec cannot act with: not stored, not live
        ├── PolicyPinned         a rollback holds until `headrace resume`
        ├── GenerationConflict   the live version was changed in the meantime
        │   └── LiveChanged      another candidate or generation is live than the caller named
        └── LeaseHeld            another follower trains this policy; the text names it

Errors of values (`SpaceError`, `EpisodeError`, `ValueError`) are the caller's. They are defined in
the modules of the types that they belong to.
"""

from __future__ import annotations


class StorageError(Exception):
    """The root of this package's errors of files."""


class FolderMoved(StorageError):
    """A folder in use was moved, unmounted or replaced: its path leads elsewhere."""


class JournalError(StorageError):
    """The root of the journal's errors."""


class JournalLocked(JournalError):
    """Another process has this journal open; the text names it."""


class JournalLookedAt(JournalLocked):
    """Other processes read this journal, as `verify` does while it copies it: try again."""


class JournalBehind(JournalError):
    """Shards are later than the journal, as after a restore: run `headrace adopt`."""


class JournalFull(JournalError):
    """No space left: the transaction was rolled back, and a later one may succeed."""


class JournalFailed(JournalError):
    """A write or a sync failed, so the content of the disk is unknown: open the journal again."""


class NewerFormat(StorageError):
    """A document has the format of a later release; the text names it. Nothing was changed."""


class ObjectError(StorageError):
    """The root of the errors of `storage.objects`."""


class ObjectNotFound(ObjectError, FileNotFoundError):
    """No object has this name."""


class ObjectExists(ObjectError, FileExistsError):
    """The name is taken, by an object or a group."""


class ObjectChanged(ObjectError):
    """An object has other content than its writer expected: another writer was first."""


class ObjectUnusable(ObjectError, OSError):
    """The name is that of a folder, a FIFO or a device, or the object is longer than the limit."""


class NothingYet(StorageError):
    """The root has no data, candidate or live version yet; a later try may find one."""


class WeightStoreError(StorageError):
    """The root of the weight store's errors."""


class WeightsNotFound(WeightStoreError):
    """There is no such candidate or version, or none is live."""


class WeightsDamaged(WeightStoreError):
    """Bytes do not match their digest, or a document does not match its format."""


class WeightsRefused(WeightStoreError, ValueError):
    """Weights that cannot be acted with; the text names the tensor, or what is not finite."""


class PolicyPinned(WeightStoreError):
    """A rollback holds: nothing can be published before `headrace resume`."""


class GenerationConflict(WeightStoreError):
    """The live version has another generation than the caller expected."""


class LiveChanged(GenerationConflict):
    """Another candidate or generation is live than the caller named: a retry changes nothing."""


class LeaseHeld(WeightStoreError):
    """Another follower trains this policy, or has taken over; the text names it."""
