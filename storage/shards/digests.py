"""The digest of a shard, by the algorithm that its footer names.

BLAKE3 is a multiple faster than SHA-256, which is all in format 1. The first 16 hex digits are in
the shard's name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from blake3 import blake3

from storage.shards.footers import footer_bytes

_BLAKE3 = b"\x18\x0fheadrace.digest\x18\x06blake3"  # a pair in Thrift's compact protocol


def digest_of(content: bytes | memoryview) -> str:
    """The digest in hex of a shard. Raises nothing, whatever the bytes are."""
    size = footer_bytes(bytes(content[-8:]))
    if _BLAKE3 in bytes(content[max(0, len(content) - size) :]):
        return blake3(content).hexdigest()
    return hashlib.sha256(content).hexdigest()


def digest_of_written(path: Path) -> str:
    """The digest in hex of a file that is to become a shard, without reading it into memory."""
    found = blake3()
    with path.open("rb") as file:  # not by blake3 itself, whose errors have no errno
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
