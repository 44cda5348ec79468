"""`keys/redaction.key`: what makes the pseudonyms of one root, and of no other."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from ingest.access.key_files import keys_folder
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.system.files import sync_directory, write_synced

KEY_BYTES = 32


def redaction_key(root: Path, policies: Iterable[PolicyDeclaration]) -> bytes:
    """The key of a root, made once a policy hashes a field. Raises DeclarationError, OSError.

    Whoever has it can find out whose pseudonym is whose; whoever loses it cannot make the same
    pseudonyms again.
    """
    path = root / "keys" / "redaction.key"
    if not path.exists():
        if not any("hash" in policy.redact.values() for policy in policies):
            return secrets.token_bytes(KEY_BYTES)  # of which no use is made
        _make(keys_folder(root) / path.name)
    return kept_key(root)


def kept_key(root: Path) -> bytes:
    """The key of a root that has one; nothing is made. Raises DeclarationError, OSError."""
    path = root / "keys" / "redaction.key"
    if not path.exists():
        raise DeclarationError(f"{path}: expected a key, found none: nothing was hashed here yet")
    try:
        key = bytes.fromhex(path.read_text())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise DeclarationError(f"{path}: expected {2 * KEY_BYTES} hex digits")
    return key


def _make(path: Path) -> None:
    """Write a new key in one step; another process may have been first."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_synced(temporary, secrets.token_hex(KEY_BYTES).encode() + b"\n", private=True)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
