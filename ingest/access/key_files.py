"""`keys/tokens.json`: the tokens of one root, written by `headrace token`, read by collectors.

The file has no secrets that a client could send; even so, it and its folder are readable only by
their owner. It is replaced atomically under a lock. Revoked tokens stay in it, because a collector
on loopback admits everybody if there are no tokens.

`keys/redaction.key` is the key of the pseudonyms and tombstones in this root, and `keys/etag.key`
the key that signs the etags of weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ingest.access.tokens import Token, TokenError, bearer, hashed
from storage.declarations.declaration import DeclarationError
from storage.errors import NewerFormat
from storage.system.files import (
    FileLock,
    make_directory,
    replace_file,
    sync_directory,
    write_synced,
)
from storage.system.formats import require_format

log = logging.getLogger("headrace.collector")

SECRET_BYTES = 32


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[Token]
    version: int = 1


_decode = msgspec.json.Decoder(_KeyFile).decode
_decode_object = msgspec.json.Decoder(dict).decode


def keys_folder(root: Path) -> Path:
    """`keys/` under a root, created if it is missing, with mode 0700."""
    folder = root / "keys"
    make_directory(folder)
    folder.chmod(0o700)
    return folder


def load_tokens(root: Path) -> list[Token]:
    """The tokens of a root, oldest first; empty without a file. Raises TokenError, OSError."""
    try:
        return _read(root)
    except FileNotFoundError:
        return []


def _read(root: Path) -> list[Token]:
    """The tokens of the file, which must exist. Raises TokenError, OSError."""
    path = root / "keys" / "tokens.json"
    data = path.read_bytes()
    try:
        require_format(_decode_object(data), 1, path, "version")
        document = _decode(data)
    except NewerFormat as error:
        raise TokenError(str(error)) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TokenError(f"{path}: {error}") from error
    if len({token.id for token in document.tokens}) != len(document.tokens):
        raise TokenError(f"{path}: expected unique token ids, got a repeated one")
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
    """Create a token and store it; return it and the text that a client sends.

    The text is not stored. `lives` is in seconds, `rate` in events per second, `open_episodes` a
    number; None: no limit. A live token's name is unique and differs from all ids, so that a name
    or an id identifies one token. Raises TokenError.
    """
    secret = secrets.token_urlsafe(SECRET_BYTES)
    created = int(wall())
    if lives is not None and not 1.0 <= lives < 1e10:
        raise TokenError(f"token {name}: expected a lifetime of 1 second or more, got {lives}")
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
                raise TokenError(f"token {name}: a live token has this name: revoke it first")
            if known.id == name:
                raise TokenError(f"token {name}: expected a name, got the id of token {known.name}")
        _save(root, [*tokens, token])
    return token, bearer(token.id, secret)


def revoke_token(root: Path, which: str, *, wall: Callable[[], float] = time.time) -> Token:
    """Revoke a token by its id or its name, and return it. Raises TokenError if there is none.

    Revoking a revoked token changes nothing.
    """
    if not (root / "keys").is_dir():
        raise TokenError(f"token {which!r:.80}: there are no tokens under {root}")
    with FileLock(root / "keys" / "lock"):
        tokens = load_tokens(root)
        named = [token for token in tokens if token.id == which]
        named = named or [token for token in tokens if token.name == which]
        if not named:
            known = ", ".join(dict.fromkeys(token.name for token in tokens)) or "none"
            raise TokenError(
                f"token {which!r:.80}: expected a token's name or id; there are: {known}"
            )
        token = next((one for one in named if one.revoked is None), named[-1])
        if token.revoked is not None:
            return token
        gone = msgspec.structs.replace(token, revoked=int(wall()))
        _save(root, [gone if one.id == token.id else one for one in tokens])
    return gone


def _save(root: Path, tokens: list[Token]) -> None:
    data = msgspec.json.format(msgspec.json.encode(_KeyFile(tokens)), indent=2)
    replace_file(root / "keys" / "tokens.json", data + b"\n", private=True)


class TokenFile(msgspec.Struct):
    """Reads the tokens again when their file has changed."""

    root: Path | None
    seen: tuple[int, int, int] | None = None

    def changed(self) -> list[Token] | None:
        """The tokens if the file has changed since the last call, else None.

        None too if the file is missing: the known tokens stay valid, and nobody else is admitted.
        Raises TokenError, and OSError (also if the file is removed during the call).
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


def redaction_key(root: Path) -> bytes:
    """The redaction key of a root, created when it is first needed: at a collector's start.

    With the key, the values behind pseudonyms and tombstones can be found by trying; without it,
    the same ones cannot be made again. Raises DeclarationError, OSError.
    """
    if not (root / "keys" / "redaction.key").exists():
        _make(keys_folder(root) / "redaction.key")
    return kept_key(root)


def kept_key(root: Path) -> bytes:
    """The existing redaction key of a root. Raises DeclarationError, OSError."""
    path = root / "keys" / "redaction.key"
    if not path.exists():
        raise DeclarationError(f"{path}: expected a key, got no file: nothing is hashed here yet")
    return _read_key(path)


def etag_key(root: Path) -> bytes:
    """The key of a root that signs the etags of weights, created at the first start.

    b"", with a line in the log, if it cannot be read or made: etags have no signature then.
    """
    try:
        path = keys_folder(root) / "etag.key"
        if not path.exists():
            _make(path)
        return _read_key(path)
    except (OSError, DeclarationError) as error:
        log.warning("after a restore of the root, clients' etags will not be believed: %s", error)
        return b""


def _read_key(path: Path) -> bytes:
    try:
        key = bytes.fromhex(path.read_text())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise DeclarationError(f"{path}: expected {2 * KEY_BYTES} hex digits, got something else")
    return key


def _make(path: Path) -> None:
    """Create the key file atomically, unless another process has created it first."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_synced(temporary, secrets.token_hex(KEY_BYTES).encode() + b"\n", private=True)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
