"""The shard writer as a child process, seen from inside: read a block, write a shard, answer."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import IO, Literal

import msgspec

from storage.shards.names import ShardError, ShardWriteError, remove_leftovers
from storage.shards.part_block import PartBlock
from storage.shards.shard import ShardWriter
from storage.shards.writer_process import (
    Reply,
    WriteRequest,
    encode_reply,
    read_message,
    write_message,
)

_decode_request = msgspec.msgpack.Decoder(WriteRequest).decode


def write_shards(
    directory: str,
    *,
    owner: str | None,
    compression: Literal["zstd", "lz4"],
    row_group_bytes: int,
) -> None:
    """Serve write requests from stdin until it ends. Only answers are written to stdout.

    The parent has created `directory`; if it is gone, it is not created again. SIGINT is ignored,
    because Ctrl-C reaches all processes of the terminal: the parent decides when this process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not be mixed with the answers
    if owner is not None:
        remove_leftovers(Path(directory), owner)
    writer = ShardWriter(
        directory, compression=compression, row_group_bytes=row_group_bytes, make=False
    )
    with replies:
        serve(writer, sys.stdin.buffer, replies)


def serve(writer: ShardWriter, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer requests until the input ends or the parent is gone."""
    try:
        while _serve_next(writer, requests, replies):
            continue
    except (EOFError, BrokenPipeError):
        return


def _serve_next(writer: ShardWriter, requests: IO[bytes], replies: IO[bytes]) -> bool:
    """Answer one request; False at the end.

    A function of its own, so that the parts of one request are freed before waiting for the next.
    """
    frames = read_message(requests)
    if frames is None:
        return False
    write_message(replies, [[encode_reply(_answer(writer, frames))]])
    return True


def _answer(writer: ShardWriter, frames: list[bytes]) -> Reply:
    try:
        request = _decode_request(frames[0])
        block = PartBlock.from_frames(frames[1:])
        ordinals = block.scalars.ordinal
        found = writer.adopt(request.stream, ordinals[0], ordinals[-1])
        return Reply(found or writer.write(request.stream, request.canonical_json, block))
    except ShardWriteError as error:
        return Reply(error=str(error), errno=error.errno)
    except (ShardError, ValueError, OSError) as error:
        return Reply(error=f"{type(error).__name__}: {error}")
