"""The damaged shards in `quarantine/{stream}/`, and the digest of each when it was moved there.

`{name}.sha256` contains a line in the format of `sha256sum`. Without it, further damage to a
damaged file could not be detected.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from storage.system.files import replace_file

SUFFIX = ".sha256"


def note_digest(path: Path, target: Path) -> None:
    """Record the digest of `path` before it is moved to `target`, unless it cannot be read."""
    if not path.is_file():  # opening a pipe would block
        return
    with contextlib.suppress(OSError):
        line = f"{_digest(path)}  {target.name}\n"
        replace_file(_note(target), line.encode())


def changed_since(path: Path) -> str:
    """How a file has changed since it was moved to quarantine, "" if it has not. Raises OSError.

    Without a recorded digest (a person moved the file), only an empty file is reported.
    """
    try:
        noted = _note(path).read_text(errors="replace").partition(" ")[0]
    except FileNotFoundError:
        return "" if path.stat().st_size else "it was set aside, and holds nothing any more"
    found = _digest(path)
    return "" if found == noted else f"it was set aside as {noted:.64}, found {found}"


def _note(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
