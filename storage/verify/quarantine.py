"""The damaged shards in `quarantine/{stream}/`, and the digest of each when it was moved there.

`{name}.sha256` contains a line in the format of `sha256sum`. Without it, further damage to a
damaged file could not be detected.
"""

from __future__ import annotations

import contextlib
import hashlib

from storage.errors import ObjectNotFound
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.shards.names import MAX_SHARD

QUARANTINE, SUFFIX = "quarantine", ".sha256"


def set_aside(root: Objects, stream: str, name: str) -> str:
    """Move a shard to quarantine, and return its new name. Raises OSError.

    Its digest is recorded before, unless it cannot be read.
    """
    before, after = f"shards/{stream}/{name}", f"{QUARANTINE}/{stream}/{name}"
    with contextlib.suppress(OSError):
        root.replace(after + SUFFIX, f"{_digest(root, before)}  {name}\n".encode())
    if isinstance(root, FolderObjects):  # which can also move what cannot be read
        root.replace(after, root.root / before)
    else:
        root.replace(after, root.read(before, limit=MAX_SHARD))
    root.delete(before)
    root.settle(before)
    return after


def changed_since(root: Objects, name: str) -> str:
    """How a file has changed since it was moved to quarantine, "" if it has not. Raises OSError.

    Without a recorded digest (a person moved the file), only an empty file is reported.
    """
    try:
        noted = root.read(name + SUFFIX).decode(errors="replace").partition(" ")[0]
    except ObjectNotFound:
        status = root.status(name)
        return "" if status and status.size else "it was set aside, and holds nothing any more"
    found = _digest(root, name)
    return "" if found == noted else f"it was set aside as {noted:.64}, found {found}"


def _digest(root: Objects, name: str) -> str:
    return hashlib.sha256(root.read(name, limit=MAX_SHARD)).hexdigest()
