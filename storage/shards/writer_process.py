"""The shard writer as a child process, seen from its parent.

Encoding Parquet would delay the process that acknowledges events. So a child, started as `python -m
storage write-shards`, receives parts as raw column buffers over a pipe, and returns a `ShardInfo`.
This module does not import Arrow.

A message is `magic, count, sizes[count]`, followed by the frames. The child does not outlive its
parent: the kernel kills it when the parent's thread that started it ends, and it exits when its
input ends.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, ClassVar, Literal

import msgspec

from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns
from storage.objects.folder import FolderObjects
from storage.objects.opening import Root, objects_at
from storage.shards.names import ShardError, ShardInfo, ShardWriteError, WriterDied
from storage.shards.part_block import PartBlock, frames_of
from storage.system.files import make_directory
from storage.system.pinned_folders import Anchor
from storage.system.process import drop_pipes, own_environment

_STORAGE = __name__.removesuffix(".shards.writer_process")
_HEAD = struct.Struct("<4sI")
_MAGIC = b"HRS1"
_MAX_FRAMES = 64
_BLOCK = 262_144
"""Small pieces are joined to blocks of this many bytes before they are written to the pipe; joining
one takes about 50 us."""


class WriteRequest(msgspec.Struct, frozen=True):
    """The first frame to the child; the frames of a PartBlock follow."""

    stream: str
    canonical_json: str


class Reply(msgspec.Struct, frozen=True):
    """The child's one frame: a shard, or an error (`errno` if the system reported it)."""

    info: ShardInfo | None = None
    error: str = ""
    errno: int | None = None


def encode_reply(reply: Reply) -> bytes:
    """A reply as msgpack; the shard's path as bytes in the file system's encoding."""
    return msgspec.msgpack.encode(reply, enc_hook=os.fsencode)


def decode_reply(data: bytes) -> Reply:
    """The reply that `encode_reply` encoded. Raises msgspec.MsgspecError for anything else."""
    return _reply_decoder.decode(data)


def _path(kind: type, value: bytes) -> Path:
    return Path(os.fsdecode(value))


_reply_decoder = msgspec.msgpack.Decoder(Reply, dec_hook=_path)


def write_message(pipe: IO[bytes], frames: Sequence[Sequence[bytes]]) -> None:
    """Send frames, each in pieces, as one message. Raises OSError if the other side has ended."""
    sizes = [sum(map(len, pieces)) for pieces in frames]
    pipe.write(_HEAD.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
    for block in _blocks(chain.from_iterable(frames)):
        pipe.write(block)
    pipe.flush()


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join the pieces to blocks of about _BLOCK bytes, because every write costs time."""
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
    """Read the frames of the next message; None if the other side closed between two messages.

    Raises EOFError if it ended within one, and ShardError for anything that is not a message.
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

    The child starts with `start()`, which does not wait until it is ready (about 0.3 s later), or
    with the first `write`. After WriterDied the next `write` starts another child. The child dies
    with the thread that called `start` or `write`.

    `directory` is the `shards/` folder of a root, which is created if necessary, or of a store. It
    and the folders `sources`, from which parts come, must not be moved: otherwise `write` raises
    FolderMoved, and a shard that was written meanwhile must not be relied on. `owner`: the
    collector id; incomplete files of killed writers for it are removed at start.
    """

    # -P: a folder named `storage` in the working directory must not be imported instead of this
    # package, which is headrace.storage if Headrace is installed.
    program: ClassVar[tuple[str, ...]] = ("-P", "-m", _STORAGE)

    def __init__(
        self,
        directory: Root,
        *,
        owner: str | None = None,
        sources: Sequence[Path] = (),
        compression: Literal["zstd", "lz4"] = "zstd",
        row_group_bytes: int = 8_000_000,
    ) -> None:
        self._shards = objects_at(directory)
        if isinstance(self._shards, FolderObjects):
            self._shards = FolderObjects(self._shards.root.absolute())
            make_directory(self._shards.root)
            sources = *sources, self._shards.root
        self._anchor = Anchor(*sources)
        self._options = ["--compression", compression, "--row-group-bytes", str(row_group_bytes)]
        if owner is not None:
            self._options += ["--owner", owner]
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = False

    @property
    def pid(self) -> int | None:
        """The child's process id, None if there is none."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the child unless it runs; return at once. Raises WriterDied if it cannot start."""
        if self._child is not None:
            return
        self._asked = False
        command = [sys.executable, *self.program, "write-shards"]
        command += ["--directory", str(self._shards), "--parent", str(os.getpid())]
        try:
            self._child = subprocess.Popen(
                command + self._options,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pipesize=1 << 20,  # fewer switches between the processes for a block of megabytes
                env=own_environment(),
            )
        except OSError as error:
            raise WriterDied(f"the shard writer cannot be started: {error}") from error

    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part | PartColumns] | PartBlock
    ) -> ShardInfo:
        """Write one shard and wait for it. The parts have their ordinals.

        Raises FolderMoved if a folder is not in its place, ShardWriteError if the shard could not
        be written, and ShardError for parts that do not fit their schema. Raises WriterDied if the
        child ended before it answered: the shard may exist or not, so look for it with
        `storage.shards.shard.find_shard`, then write again.
        """
        self.check()  # before and after: a shard written elsewhere must not be relied on
        if isinstance(parts, PartBlock):
            frames = [[frame] for frame in parts.to_frames()]
        else:
            frames = frames_of(parts)
        request = msgspec.msgpack.encode(WriteRequest(stream, canonical_json))
        reply = self._exchange([[request], *frames])
        self.check()
        if reply.info is None:
            raise ShardWriteError(reply.error, reply.errno)
        if not self._has(reply.info):
            raise ShardWriteError(f"{reply.info.path}: expected the written shard, found no file")
        return reply.info

    def _has(self, info: ShardInfo) -> bool:
        if isinstance(self._shards, FolderObjects):  # wherever the folder is by now
            return self._anchor.has(info.path)
        return self._shards.status(f"{info.stream}/{info.path.name}") is not None

    def check(self) -> None:
        """Raise FolderMoved unless the folders are in their places; OSError if that is unknown."""
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
        """End the child, so that two never write at once; return how it ended, for a message."""
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
        """Kill the child at once, from any thread; a waiting `write` raises WriterDied."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Let the child finish and exit. Closing twice is no error.

        A child that was never asked to write is killed, as it may still be loading its modules.
        """
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

    def __exit__(self, *_: object) -> None:
        self.close()
