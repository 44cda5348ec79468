"""A second, independent reader of shards to compare ours with: fastparquet, in its own process.

    with SecondReader() as second:
        for wrong in second.compare(path):
            wrong.kind, wrong.text

It can crash where other readers raise, as on damaged pages, and is restarted for the next shard.
Both readers hold one shard in memory at a time, the second one decodes a row group of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import ClassVar, Literal, TypeAlias

import msgspec
import pyarrow as pa

from storage.objects.ranged import RangedFile
from storage.shards.arrow_arrays import decode_column, present, table_specs
from storage.shards.names import ShardError
from storage.shards.shard import Shard, read_shard
from storage.shards.writer_process import read_message, write_message
from storage.system.process import drop_pipes, own_environment
from storage.verify.column_values import ColumnValues, of_items, of_numbers
from storage.wording import counted

SHARD_SECONDS = 300.0
"""The longest time that the second reader may take for one shard, in seconds."""

_STORAGE = __name__.removesuffix(".verify.second_reader")

DisagreementKind: TypeAlias = Literal["differs", "unreadable", "crashed"]


class ColumnReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first frame of an answer: a column of a row group, the end, or an error.

    `first` is the first row of the row group, or the number of all rows at the end.
    """

    column: str = ""
    first: int = 0
    dtype: str = ""
    end: bool = False
    error: str = ""


_decode_reply = msgspec.msgpack.Decoder(ColumnReply).decode


@dataclass(frozen=True)
class Disagreement:
    """What is wrong with one shard: other values, no values, or a crash of the second reader."""

    kind: DisagreementKind
    text: str


class SecondReader:
    """Reads shards in a child process and compares the values with those of our reader.

    `seconds` limits the time for each shard. Raises ModuleNotFoundError if fastparquet is not
    installed.
    """

    # -P: a folder named `storage` in the working directory must not be imported instead
    program: ClassVar[tuple[str, ...]] = ("-P", "-m", _STORAGE, "read-shards")

    def __init__(self, seconds: float = SHARD_SECONDS) -> None:
        if find_spec("fastparquet") is None:
            raise ModuleNotFoundError("No module named 'fastparquet'", name="fastparquet")
        self.name = f"fastparquet {version('fastparquet')}"
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None

    def compare(self, shard: Shard) -> list[Disagreement]:
        """The disagreements about a shard that our reader accepts: at most one for each column.

        Raises the errors of `storage.shards.shard.read_shard`, and OSError if no process can be
        started.
        """
        table, content = read_shard(shard), RangedFile.at(shard).whole()
        child = self._running()
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        try:
            return _compared(table, _answers(child, content), self.name)
        except (OSError, EOFError, ShardError, msgspec.MsgspecError) as error:
            child.kill()  # it is still running, but broke the protocol
            status = self._end(child)
            outcome = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
            if late.is_set():
                outcome = f"was not done after {self._seconds:g} s"
            return [Disagreement("crashed", f"{self.name} {outcome} ({error})")]
        finally:
            timer.cancel()
            if late.is_set() and self._child is child:  # it was killed right after its answer
                self._end(child)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, *self.program, "--parent", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=own_environment(),
            )
        return self._child

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        self._child = None
        drop_pipes(child)
        return child.wait()

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._end(self._child)

    def __enter__(self) -> SecondReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answers(
    child: subprocess.Popen[bytes], content: bytes
) -> Iterator[tuple[ColumnReply, list[bytes]]]:
    """The process's answers about a shard, to the last one. Raises EOFError if it dies before."""
    if child.stdin is None or child.stdout is None:
        raise EOFError("it has no pipes")
    write_message(child.stdin, [[content]])
    while True:
        frames = read_message(child.stdout)
        if not frames:
            raise EOFError("it was gone before its answer")
        reply = _decode_reply(frames[0])
        yield reply, frames[1:]
        if reply.end or reply.error:
            return


def _compared(
    table: pa.Table, answers: Iterator[tuple[ColumnReply, list[bytes]]], name: str
) -> list[Disagreement]:
    wrong: dict[str, str] = {}
    found: set[str] = set()
    rows = 0
    for reply, frames in answers:
        if reply.error:
            return [Disagreement("unreadable", f"{name} cannot read it: {reply.error}")]
        if reply.end:
            rows = reply.first
            continue
        found.add(reply.column)
        if reply.column not in wrong:
            theirs = ColumnValues.from_frames(reply.dtype, frames)
            text = _difference(table, reply, theirs)
            if text:
                wrong[reply.column] = f"{reply.column}: {text} by {name}"
    for column in table.column_names:
        if column not in found and rows:
            wrong[column] = f"{column}: no such column in {name}"
    if rows != len(table):
        wrong[""] = f"{counted(len(table), 'row')} here, {rows:,} by {name}"
    return [Disagreement("differs", text) for text in wrong.values()]


def _difference(table: pa.Table, reply: ColumnReply, theirs: ColumnValues) -> str:
    """How a column of a row group differs from our reader's, "" if it does not."""
    if reply.column not in table.column_names:
        return "no such column here, one"
    part = table.slice(reply.first, len(theirs))
    try:
        ours = _values(part, reply.column)
    except Exception as error:  # an error of our reader is a difference, too
        return f"cannot be decoded here ({type(error).__name__}: {error}), can be"
    if len(ours) != len(theirs):
        return f"{counted(len(ours), 'row')} from row {reply.first} here, {len(theirs):,}"
    if ours.dtype != theirs.dtype:
        return f"{ours.dtype} here, {theirs.dtype}"
    rows = ours.differing(theirs)
    if not len(rows):
        return ""
    first = int(rows[0])
    return (
        f"{len(rows):,} of {len(ours):,} values from row {reply.first} differ, the first in row "
        f"{reply.first + first}: {ours.shown(first)} here, {theirs.shown(first)}"
    )


def _values(part: pa.Table, name: str) -> ColumnValues:
    """A column as our reader decodes it."""
    decoded = decode_column(part, name)
    if decoded.dtype == object:
        return of_items("str", [None if item is None else item.encode() for item in decoded])
    spec = table_specs(part.schema).get(name)
    plain = spec is None or spec.encoding == "scalar"
    return of_numbers(decoded, present(part, name), nan_is_null=plain)
