"""The shard writer as a child process, seen from its parent.

Parquet encoding would hold up the process that acknowledges; so parts go to a child, started as
`python -m storage write-shards`, as raw column buffers over a pipe, and a `ShardInfo` comes back.
Nothing here imports Arrow.

A message is `magic, count, sizes[count]`, then the frames. The child lives no longer than its
parent: the kernel kills it when the parent's thread that started it ends, and it leaves by itself
when its input ends.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Literal

import msgspec

from storage.experience.episode import Part
from storage.shards.names import ShardError, ShardInfo, ShardWriteError, WriterDied
from storage.shards.part_block import PartBlock, frames_of
from storage.system.files import make_directory
from storage.system.pinned_folders import Anchor
from storage.system.process import drop_pipes, own_environment

__all__ = [
    "Reply",
    "WriteRequest",
    "WriterProcess",
    "decode_reply",
    "encode_reply",
    "read_message",
    "write_message",
]

_STORAGE = __name__.removesuffix(".shards.writer_process")
_HEAD = struct.Struct("<4sI")
_MAGIC = b"HRS1"
_MAX_FRAMES = 64
_BLOCK = 262_144
"""Bytes of small pieces that go to the pipe together; some 50 us to put together."""


class WriteRequest(msgspec.Struct, frozen=True):
    """The first frame to the child; the frames of a PartBlock follow."""

    stream: str
    canonical_json: str


class Reply(msgspec.Struct, frozen=True):
    """The child's one frame: a shard, or what went wrong (`errno` when the system said so)."""

    info: ShardInfo | None = None
    error: str = ""
    errno: int | None = None


def encode_reply(reply: Reply) -> bytes:
    """A reply as msgpack; the shard's path as the system's bytes."""
    return msgspec.msgpack.encode(reply, enc_hook=os.fsencode)


def decode_reply(data: bytes) -> Reply:
    """The reply of `encode_reply`. Raises msgspec.MsgspecError for anything else."""
    return _reply_decoder.decode(data)


def _path(kind: type, value: bytes) -> Path:
    return Path(os.fsdecode(value))


_reply_decoder = msgspec.msgpack.Decoder(Reply, dec_hook=_path)


def write_message(pipe: IO[bytes], frames: Sequence[Sequence[bytes]]) -> None:
    """Send frames, each in its pieces, as one message. Raises OSError when the other is gone."""
    sizes = [sum(map(len, pieces)) for pieces in frames]
    pipe.write(_HEAD.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
    for block in _blocks(chain.from_iterable(frames)):
        pipe.write(block)
    pipe.flush()


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces behind each other, about _BLOCK bytes at a time: a write each would be dear."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        if size + len(piece) >= _BLOCK:
            yield b"".join(waiting)
            waiting, size = [], 0
        if len(piece) >= _BLOCK:
            yield piece
        else:
            waiting.append(piece)
            size += len(piece)
    yield b"".join(waiting)


def read_message(pipe: IO[bytes]) -> list[bytes] | None:
    """The frames of the next message; None when the other side closed between two messages.

    Raises EOFError when it ended inside one, ShardError for what is no message.
    """
    head = pipe.read(_HEAD.size)
    if not head:
        return None
    magic, count = _HEAD.unpack(_whole(head, _HEAD.size))
    if magic != _MAGIC or count > _MAX_FRAMES:
        raise ShardError(f"expected a message, got {head!r}")
    sizes = struct.unpack(f"<{count}Q", _whole(pipe.read(8 * count), 8 * count))
    return [_whole(pipe.read(size), size) for size in sizes]


def _whole(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise EOFError(f"expected {size} bytes, the pipe ended after {len(data)}")
    return data


class WriterProcess:
    """Writes shards in a child process; used by one thread at a time.

    The child starts with `start()` (about 0.3 s until it is ready, which nobody waits for), or with
    the first `write`. After WriterDied the next `write` starts another one. Keep the thread that
    calls `start` or `write` alive: the child dies with it.

    `directory` is made when it is not there. It and the folders `beside` it, which is where the
    parts come from, have to stay in their places: FolderMoved, and nobody may believe a shard that
    was written meanwhile. `owner`: the collector id; what its killed predecessors left half-written
    is removed at start.
    """

    # -P: a folder called `storage` where the user happens to stand is not this package, which is
    # headrace.storage where Headrace is installed.
    program: ClassVar[tuple[str, ...]] = ("-P", "-m", _STORAGE)

    def __init__(
        self,
        directory: Path,
        *,
        owner: str | None = None,
        beside: Sequence[Path] = (),
        compression: Literal["zstd", "lz4"] = "zstd",
        row_group_bytes: int = 8_000_000,
    ) -> None:
        self.directory = directory.absolute()
        make_directory(self.directory)
        self._anchor = Anchor(*beside, self.directory)
        self._options = ["--compression", compression, "--row-group-bytes", str(row_group_bytes)]
        if owner is not None:
            self._options += ["--owner", owner]
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = False

    @property
    def pid(self) -> int | None:
        """The child's process id, None when there is none."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the child unless it runs; returns at once. Raises WriterDied if it cannot."""
        if self._child is not None:
            return
        self._asked = False
        command = [sys.executable, *self.program, "write-shards"]
        command += ["--directory", str(self.directory), "--parent", str(os.getpid())]
        try:
            self._child = subprocess.Popen(
                command + self._options,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pipesize=1 << 20,  # fewer turns between the two on a block of megabytes
                env=own_environment(),
            )
        except OSError as error:
            raise WriterDied(f"the shard writer cannot be started: {error}") from error

    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part] | PartBlock
    ) -> ShardInfo:
        """Write one shard and wait for it. The parts have their ordinals.

        Raises FolderMoved when that is not in its place, WriterDied when the child is gone before
        it answered (the shard may exist or not: `storage.shards.shard.find_shard`, then write
        again), ShardWriteError when it could not write, ShardError for parts that do not fit their
        schema.
        """
        self.check()  # rarely is a shard left where it does not belong; after it none is believed
        if isinstance(parts, PartBlock):
            frames = [[frame] for frame in parts.to_frames()]
        else:
            frames = frames_of(parts)
        request = msgspec.msgpack.encode(WriteRequest(stream, canonical_json))
        reply = self._exchange([[request], *frames])
        self.check()
        if reply.info is None:
            raise ShardWriteError(reply.error, reply.errno)
        if not self._anchor.has(reply.info.path):
            raise ShardWriteError(f"{reply.info.path}: expected the written shard, found no file")
        return reply.info

    def check(self) -> None:
        """Raises FolderMoved unless the folders are where they were; OSError when it is unknown."""
        self._anchor.require()

    def _exchange(self, frames: Sequence[Sequence[bytes]]) -> Reply:
        self.start()
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise WriterDied("the shard writer has no pipes")
        self._asked = True
        try:
            write_message(child.stdin, frames)
            answer = read_message(child.stdout)
            if answer:
                return decode_reply(answer[0])
        except (OSError, EOFError, msgspec.MsgspecError, ShardError) as error:
            raise WriterDied(f"the shard writer {self._end()} ({error!r:.200})") from error
        raise WriterDied(f"the shard writer {self._end()}")

    def _end(self) -> str:
        """Make sure that the child is gone, so that two never write at once; say how it went."""
        child, self._child = self._child, None
        if child is None:
            return "was not running"
        drop_pipes(child)
        try:
            code = child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        return f"died by signal {-code}" if code < 0 else f"ended with status {code}"

    def kill(self) -> None:
        """End the child at once, from any thread; a `write` that waits raises WriterDied."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Let the child finish and leave, for good; one that was never asked is killed, which may
        still load its modules. No error when it is gone already."""
        child, self._child = self._child, None
        if child is not None:
            if not self._asked:
                child.kill()
            drop_pipes(child)
            child.wait()
        self._anchor.close()

    def __enter__(self) -> WriterProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
