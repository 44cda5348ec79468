"""What lies in `quarantine/{stream}/`: damaged shards, and beside each what it was when it came.

`{name}.sha256` holds a line as `sha256sum` writes and checks it: a file that is damaged already has
no other proof that nothing more of it was lost since.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from storage.system.files import replace_file

SUFFIX = ".sha256"


def note_digest(path: Path, target: Path) -> None:
    """Note what `path` is before it becomes `target`. Of what cannot be read nothing is noted."""
    if not path.is_file():  # a pipe of that name would be waited for
        return
    with contextlib.suppress(OSError):
        line = f"{_digest(path)}  {target.name}\n"
        replace_file(_note(target), line.encode())


def changed_since(path: Path) -> str:
    """How a file is not what was set aside, "" when it is. Raises OSError.

    Without a note (a person set the file aside) only one that holds nothing is told.
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
