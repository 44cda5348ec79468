"""`keys/tokens.json`: the tokens of one root, written by `headrace token`, followed by collectors.

The file holds no secret that a client could send, yet is for its owner alone, as is its folder. It
is replaced in one step under a lock, so that several commands and a running collector meet no half
of it. A revoked token stays in it: a file without tokens would open a loopback collector to all.

`keys/redaction.key` makes the pseudonyms of one root, and of no other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ingest.access.tokens import Token, TokenError, bearer, hashed
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.system.files import (
    FileLock,
    make_directory,
    replace_file,
    sync_directory,
    write_synced,
)

SECRET_BYTES = 32


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[Token]
    version: int = 1


_decode = msgspec.json.Decoder(_Document).decode


def keys_folder(root: Path) -> Path:
    """`keys/` under a root, made if need be, for its owner alone."""
    folder = root / "keys"
    make_directory(folder)
    folder.chmod(0o700)
    return folder


def load_tokens(root: Path) -> list[Token]:
    """The tokens of a root, the oldest first; none without a file. Raises TokenError, OSError."""
    try:
        return _read(root)
    except FileNotFoundError:
        return []


def _read(root: Path) -> list[Token]:
    """The tokens of a file that is there. Raises TokenError, OSError."""
    path = root / "keys" / "tokens.json"
    data = path.read_bytes()
    try:
        document = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TokenError(f"{path}: {error}") from error
    if document.version != 1:
        raise TokenError(f"{path}: expected version 1, got {document.version}")
    if len({token.id for token in document.tokens}) != len(document.tokens):
        raise TokenError(f"{path}: expected each id once")
    return document.tokens


def create_token(
    root: Path,
    name: str,
    scopes: Sequence[str],
    *,
    lives: float | None = None,
    rate: float | None = None,
    open_episodes: int | None = None,
    wall: Callable[[], float] = time.time,
) -> tuple[Token, str]:
    """Make a token; it and the text that a client sends, which is nowhere kept.

    `lives` is in seconds. Names of live tokens are unique, and none is the id of another: what is
    revoked by either is one token. Raises TokenError.
    """
    secret = secrets.token_urlsafe(SECRET_BYTES)
    created = int(wall())
    if lives is not None and not 1.0 <= lives < 1e10:
        raise TokenError(f"token {name}: expected it to live for a second or more, got {lives}")
    token = Token(
        id=secrets.token_hex(4),
        name=name,
        scopes=tuple(dict.fromkeys(scopes)),
        sha256=hashed(secret),
        created=created,
        expires=None if lives is None else created + int(lives),
        rate=rate,
        open_episodes=open_episodes,
    )
    with FileLock(keys_folder(root) / "lock"):
        tokens = load_tokens(root)
        for known in tokens:
            if known.name == name and known.state(created) == "live":
                raise TokenError(f"token {name}: there is one of that name: revoke it first")
            if known.id == name:
                raise TokenError(f"token {name}: it is the id of {known.name}: choose another")
        _save(root, [*tokens, token])
    return token, bearer(token.id, secret)


def revoke_token(root: Path, which: str, *, wall: Callable[[], float] = time.time) -> Token:
    """Revoke a token, by its id or else its name. Revoking twice is once. Raises TokenError."""
    if not (root / "keys").is_dir():
        raise TokenError(f"token {which!r:.80}: there are no tokens under {root}")
    with FileLock(root / "keys" / "lock"):
        tokens = load_tokens(root)
        named = [token for token in tokens if token.id == which]
        named = named or [token for token in tokens if token.name == which]
        if not named:
            known = ", ".join(dict.fromkeys(token.name for token in tokens)) or "none"
            raise TokenError(f"token {which!r:.80}: there is no such token; there are: {known}")
        token = next((one for one in named if one.revoked is None), named[-1])
        if token.revoked is not None:
            return token
        gone = msgspec.structs.replace(token, revoked=int(wall()))
        _save(root, [gone if one.id == token.id else one for one in tokens])
    return gone


def _save(root: Path, tokens: list[Token]) -> None:
    data = msgspec.json.format(msgspec.json.encode(_Document(tokens)), indent=2)
    replace_file(root / "keys" / "tokens.json", data + b"\n", private=True)


class TokenFile(msgspec.Struct):
    """Reads the tokens again when their file has changed."""

    root: Path | None
    seen: tuple[int, int, int] | None = None

    def changed(self) -> list[Token] | None:
        """The tokens, if the file is another one than at the last call; None if it is the same.

        A file that is gone is no reason to let anybody in: what was known stays, also when it goes
        between the look and the reading. Raises TokenError, OSError.
        """
        if self.root is None:
            return None
        try:
            found = (self.root / "keys" / "tokens.json").stat()
        except FileNotFoundError:
            return None
        seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        if seen == self.seen:
            return None
        tokens = _read(self.root)
        self.seen = seen
        return tokens


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
