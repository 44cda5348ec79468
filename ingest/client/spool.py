"""What a client has logged and nobody has acknowledged, on disk: `on_full="spool"`.

A process writes one *segment*: a folder under the spool's directory, whose lock it holds for as
long as it lives. An event is in its segment before its call returns, so that SIGKILL loses none;
with `sync` it is on the disk itself, so that a cut of the power does not either. What memory has no
room for is read back from there. What was acknowledged is noted, and files of which nothing is left
are removed.

The next process takes up the segments that nobody holds, and delivers them as they are: under the
instance that they name, so that the collector tells what it has already. Only a segment that names
none, because its process never reached the collector, is given one, before the first of its events
is sent.

    segment-PID-RANDOM/lock
    segment-PID-RANDOM/reserve           room on a full disk, for what must be noted before a send
    segment-PID-RANDOM/00000000, ...     pieces of frames: kind, length, CRC-32, content (msgpack)

The first frame of a piece says what is known without those before it. A frame that does not fit
its checksum ends its piece.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ingest.client.declarations import ClientPolicy, Draft
from ingest.protocol.messages import Decision, End, Event, LogAction, LogReturns, Start
from storage.experience.range_set import RangeSet
from storage.spaces.descriptors import SpaceError
from storage.system.files import FileLock, sync_directory

log = logging.getLogger("headrace.client")

PIECE_BYTES = 8_000_000
LONGEST_RUN = 8  # events of one episode that are not torn between two batches for its length
_READ_BYTES = 262_144
_RESERVE = "reserve"
_RESERVE_BYTES = 65_536
_FRAME = struct.Struct("<BII")
_HEAD, _INSTANCE, _START, _EVENT, _DRAFT, _DONE, _MOVED = range(7)
_COUNTED = (_START, _EVENT, _DRAFT)
_ARRAY = 1  # the msgpack extension of an array in a draft


class Begun(msgspec.Struct, array_like=True, frozen=True):
    """An open episode: its start, and how many steps it has so far."""

    start: Start
    steps: int


class _Head(msgspec.Struct, array_like=True):
    """`address` is the collector's, `base` the number of the piece's first event, `begun` are the
    episodes that were open then."""

    address: str
    base: int
    instance: str | None
    next_start: int
    begun: list[Begun]
    moved: list[Moved]


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """Events of `old` from `seq` on are those of the episode `new`, which has start `start`.

    `step` is the number in `old` of its first step (None: unknown), `ts` that step's time.
    """

    old: str
    seq: int
    new: str
    start: int
    step: int | None
    ts: int | None


def _packed(value: Any) -> Any:
    """What msgpack has no type for: drafts, and in them arrays and what becomes one (a range)."""
    if isinstance(value, Draft):
        return value.value
    try:
        array = np.asarray(value)
    except Exception:  # of whatever kind: it is the caller's
        array = np.empty((), object)
    if not array.dtype.hasobject:
        content = msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes()))
        return msgspec.msgpack.Ext(_ARRAY, content)
    raise TypeError(f"expected numbers, strings, arrays and their lists, got {type(value)}")


def _unpacked(code: int, data: memoryview) -> Any:
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(content, dtype).reshape(shape)


_sync = getattr(os, "fdatasync", os.fsync)
_encode = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_decode_event = msgspec.msgpack.Decoder(Event, ext_hook=_unpacked).decode
_decode_draft = msgspec.msgpack.Decoder(tuple[str | None, Event], ext_hook=_unpacked).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_moved = msgspec.msgpack.Decoder(Moved).decode
_decode_done = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


def _frame(kind: int, content: bytes) -> bytes:
    return _FRAME.pack(kind, len(content), zlib.crc32(content)) + content


def framed(event: Event) -> bytes:
    """An event as it stands in a file. Raises SpaceError for a value that cannot stand there."""
    values = (getattr(event, "obs", None), getattr(event, "action", None))
    drafts = [value for value in values if type(value) is Draft]
    try:
        if drafts:
            return _frame(_DRAFT, _encode((drafts[0].policy.policy_id, event)))
        return _frame(_START if type(event) is Start else _EVENT, _encode(event))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SpaceError(f"Episode {event.episode_id}: cannot be spooled: {error}") from error


def _frames(data: bytes) -> Iterator[tuple[int, memoryview, int]]:
    """(kind, content, where the next frame begins) of each whole frame."""
    at, view = 0, memoryview(data)
    while at + _FRAME.size <= len(view):
        kind, length, checksum = _FRAME.unpack_from(view, at)
        end = at + _FRAME.size + length
        content = view[at + _FRAME.size : end]
        if end > len(view) or zlib.crc32(content) != checksum:
            return
        yield kind, content, end
        at = end


@dataclass
class _Piece:
    path: Path
    base: int  # the number of its first event
    size: int = 0

    @property
    def serial(self) -> int:
        return int(self.path.name)


class SpoolSegment:
    """The events of one process, in order. They are named by their numbers, from 0.

    `unread` counts those that are on disk alone, `instance` is under what they are sent,
    `next_start` the next number of a start of it.
    """

    def __init__(self, folder: Path, lock: FileLock, piece_bytes: int, sync: bool) -> None:
        self.folder = folder
        self.address = ""
        self.instance: str | None = None
        self.next_start = 0
        self.unread = 0
        self.unreadable = 0  # events that are left here
        self.begun: dict[str, Begun] = {}  # as of what was read, with those that are not over
        self.moved: dict[str, Moved] = {}
        self._into: dict[str, Moved] = {}  # the same by their new episodes
        self.damaged = 0  # bytes
        self.is_foreign = False  # of a process before this one
        self._lock = lock
        self._piece_bytes = piece_bytes
        self._sync = sync
        self._next = 0
        self._done = RangeSet()
        self._pieces: deque[_Piece] = deque()
        self._written: dict[str, Begun] = {}  # as of what is written, with those that have no end
        self._steps: dict[int, int] = {}  # step numbers of the actions that were read, not judged
        self._started: set[str] = set()  # moved episodes whose start is told
        self._fd = -1
        self._reading = (0, 0, 0)  # a piece's serial, the place in it, the number there

    @classmethod
    def create(cls, directory: Path, piece_bytes: int, sync: bool) -> SpoolSegment:
        while True:
            name = f"segment-{os.getpid()}-{secrets.token_hex(6)}"
            fresh, folder = directory / f"new-{name}", directory / name
            fresh.mkdir()
            lock = FileLock(fresh / "lock")
            try:
                if lock.acquire(blocking=False):
                    (fresh / _RESERVE).write_bytes(bytes(_RESERVE_BYTES))
                    fresh.rename(folder)  # nobody sees it unlocked, and takes it for an empty one
                    break
            except FileNotFoundError:  # removed by `sweep` before it was locked
                lock.release()
            except OSError:
                lock.release()
                shutil.rmtree(fresh, ignore_errors=True)
                raise
        if sync:
            sync_directory(directory)
        return cls(folder, lock, piece_bytes, sync)

    @staticmethod
    def sweep(directory: Path) -> None:
        """Remove what processes that were killed within `create` have left."""
        for fresh in directory.glob("new-segment-*"):
            lock = FileLock(fresh / "lock")
            with contextlib.suppress(OSError):
                if lock.acquire(blocking=False):
                    shutil.rmtree(fresh, ignore_errors=True)
                    lock.release()

    @classmethod
    def take_up(cls, folder: Path, piece_bytes: int, sync: bool) -> SpoolSegment | None:
        """A segment that nobody holds, as its process left it; None when somebody does."""
        lock = FileLock(folder / "lock")
        try:
            if not lock.acquire(blocking=False):
                return None
            segment = cls(folder, lock, piece_bytes, sync)
            segment.is_foreign = True
            segment._scan()
        except (OSError, msgspec.MsgspecError) as error:  # removed at this moment, or not ours
            lock.release()
            if folder.exists():
                log.warning("%s: the spooled events are left as they are: %s", folder, error)
            return None
        return segment

    @property
    def nbytes(self) -> int:
        return sum(piece.size for piece in list(self._pieces))

    @property
    def waiting(self) -> int:
        """Events that nobody has acknowledged."""
        return self._next - len(self._done)

    # --- writing -----------------------------------------------------------------------------

    def append(self, frames: bytes, events: Sequence[Event], *, left: bool) -> int:
        """Write events; the number of the first. `left`: they are to be read from here again.

        Raises OSError, having written nothing.
        """
        self._write(frames)
        first, self._next = self._next, self._next + len(events)
        for number, event in enumerate(events, first):
            self._note(self._written, event)
            if not left:
                self._note_read(number, event)
        if left:
            self.unread += len(events)
        else:
            piece = self._pieces[-1]
            self._reading = (piece.serial, piece.size, self._next)
        return first

    def _note(self, begun: dict[str, Begun], event: Event, *, over: bool = True) -> int | None:
        """Take up an event in what is known of the open episodes; an action's step number."""
        if isinstance(event, Start):
            self.next_start = max(self.next_start, (event.start or 0) + 1)
            if event.agent_id is None:
                begun[event.episode_id] = Begun(event, 0)
        elif isinstance(event, (LogAction, Decision)):
            found = begun.get(event.episode_id)
            if found is not None:
                begun[event.episode_id] = Begun(found.start, found.steps + 1)
                return found.steps
        elif over and isinstance(event, End):
            begun.pop(event.episode_id, None)
        return None

    def _note_read(self, number: int, event: Event) -> None:
        step = self._note(self.begun, event, over=False)
        if step is not None:
            self._steps[number] = step

    def note_instance(self, instance: str) -> None:
        """Note under which instance the events are sent from now on. Raises OSError."""
        self._write_needed(_frame(_INSTANCE, _encode(instance)))
        self.instance = instance

    def done(self, numbers: Iterable[int]) -> None:
        """Note that events were judged; files of which nothing is left are removed."""
        numbers = sorted(numbers)
        judged = RangeSet.of(numbers)
        self._done.update(judged)
        for number in numbers:
            self._steps.pop(number, None)
        with contextlib.suppress(OSError):  # then they are sent once more, and told apart
            self._write(_frame(_DONE, _encode(judged.ranges())), sync=False)
        while len(self._pieces) > 1:
            first, second = self._pieces[0], self._pieces[1]
            if second.base > first.base and not self._done.contains_range(
                first.base, second.base - 1
            ):
                return
            with contextlib.suppress(OSError):  # nothing of it is read again
                self._pieces.popleft().path.unlink(missing_ok=True)

    def _write_needed(self, frame: bytes) -> None:
        """Write what must be on disk before the next event is sent: a full disk becomes empty only
        by that."""
        try:
            self._write(frame)
        except OSError:
            try:
                (self.folder / _RESERVE).unlink()
            except OSError:
                pass
            else:
                return self._write(frame)
            raise

    def _write(self, frames: bytes, *, sync: bool = True) -> None:
        if self._fd < 0 or self._pieces[-1].size >= self._piece_bytes:
            self._roll()
        piece = self._pieces[-1]
        try:
            rest = memoryview(frames)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            if self._sync and sync:
                _sync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, piece.size)
            raise
        piece.size += len(frames)

    def _roll(self) -> None:
        """Begin the next piece, with what is known without those before it."""
        serial = self._pieces[-1].serial + 1 if self._pieces else 0
        path = self.folder / f"{serial:08d}"
        head = _Head(
            self.address,
            self._next,
            self.instance,
            self.next_start,
            list(self._written.values()),
            list(self.moved.values()),
        )
        data = _frame(_HEAD, _encode(head))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(f"{path}: no room for the first frame")
            if self._sync:
                _sync(fd)
                sync_directory(self.folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._pieces.append(_Piece(path, self._next, len(data)))

    # --- reading -----------------------------------------------------------------------------

    def _scan(self) -> None:
        """What an earlier process left: how many events, and which of them were judged."""
        for path in sorted(one for one in self.folder.iterdir() if one.name.isdigit()):
            data = path.read_bytes()
            frames = list(_frames(data))
            end = frames[-1][2] if frames else 0
            piece = _Piece(path, self._next, len(data))
            for kind, content, _ in frames:
                self._scan_frame(kind, content)
                if kind == _HEAD:
                    piece.base = self._next
            if end < len(data):
                self.damaged += len(data) - end
            if end:
                self._pieces.append(piece)
            else:
                path.unlink()
        if self._pieces:
            self._reading = (self._pieces[0].serial, 0, self._pieces[0].base)
        self.unread = self.waiting

    def _scan_frame(self, kind: int, content: memoryview) -> None:
        if kind == _HEAD:
            head = _decode_head(content)
            if not self._pieces:
                self.begun = {one.start.episode_id: one for one in head.begun}
            if head.base > self._next:  # those before are done, or damaged
                self._done.add_range(self._next, head.base - 1)
                self._next = head.base
            self.address, self.instance = head.address, head.instance
            self.next_start = max(self.next_start, head.next_start)
            for one in head.moved:
                self._move(one)
        elif kind in _COUNTED:
            self._next += 1
            if kind == _START:
                start = _decode_event(content)
                if isinstance(start, Start):
                    self.next_start = max(self.next_start, (start.start or 0) + 1)
        elif kind == _INSTANCE:
            self.instance = msgspec.msgpack.decode(content)
        elif kind == _DONE:
            for first, last in _decode_done(content):
                self._done.add_range(first, last)
        elif kind == _MOVED:
            self._move(_decode_moved(content))

    def read(
        self, most: int, policy: Callable[[str | None], ClientPolicy]
    ) -> list[tuple[int, Event]]:
        """The next unread events with their numbers; none at the end.

        About `most`, or 256 kB; then up to 8 events that finish an episode, or the rewards of a
        step: one that is sent in two halves may be abandoned between them. An event that goes on
        in another episode is that one's; its start comes before it, as number -1. An unexpected
        error leaves all of them to the next read.
        """
        before = self._reading, self.unread, set(self._started), dict(self.begun)
        try:
            return self._read(most, policy)
        except Exception:
            self._reading, self.unread, self._started, self.begun = before
            raise

    def _read(
        self, most: int, policy: Callable[[str | None], ClientPolicy]
    ) -> list[tuple[int, Event]]:
        found: list[tuple[int, Event]] = []
        nbytes = 0
        while self.unread:
            serial, at, number = before = self._reading
            piece = next((one for one in self._pieces if one.serial == serial), None)
            why = "damaged"
            try:
                data = b"" if piece is None else self._chunk(piece, at)
            except OSError as error:
                data, why = b"", str(error)
            for kind, content, end in _frames(data):
                if kind in _COUNTED and self._is_whole(found, most, kind):
                    return found
                number += kind in _COUNTED
                self._reading = (serial, at + end, number)
                if kind in _COUNTED and number - 1 in self._done:
                    self._pass_over(kind, content, policy)
                elif kind in _COUNTED:
                    found += self._entered(number - 1, kind, content, policy)
                    nbytes += len(content)
                    if nbytes >= _READ_BYTES:
                        most = min(most, max(1, len(found)))
            if self._reading == before:
                self._pass_on(serial, number, why)
        return found

    def _pass_on(self, serial: int, number: int, why: str) -> None:
        """Go on reading behind a piece. Those of its events, from a number on, that could not be
        read stay where they are: the next process may have more luck."""
        following = next((one for one in self._pieces if one.serial > serial), None)
        end = self._next if following is None else following.base
        missing = sum(one not in self._done for one in range(number, end))
        if missing:
            log.error("%s: %d events cannot be read: %s", self.folder, missing, why)
            self.unreadable += missing
            self.unread -= missing
        if following is not None:
            self._reading = (following.serial, 0, following.base)
        else:
            self.unread = 0
            self._reading = (serial, self._pieces[-1].size if self._pieces else 0, self._next)

    @staticmethod
    def _is_whole(found: Sequence[tuple[int, Event]], most: int, following: int) -> bool:
        """Whether a read may end before a frame of this kind."""
        if len(found) < most:
            return False
        is_rewarded = not isinstance(found[-1][1], (LogAction, Decision))
        return following == _START or (len(found) >= most + LONGEST_RUN and is_rewarded)

    def _chunk(self, piece: _Piece, at: int) -> bytes:
        """Some whole frames of a piece from a place in it on; empty at its end."""
        with piece.path.open("rb") as file:
            file.seek(at)
            data = file.read(_READ_BYTES)
            if len(data) >= _FRAME.size:
                length = _FRAME.size + _FRAME.unpack_from(data)[1]
                if length > len(data) and at + length <= piece.size:
                    data += file.read(length - len(data))
        return data

    def _pass_over(
        self, kind: int, content: memoryview, policy: Callable[[str | None], ClientPolicy]
    ) -> None:
        """Note of an event that was judged what the following ones of its episode need."""
        with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            self._note(self.begun, self._decoded(kind, content, policy))

    def _entered(
        self,
        number: int,
        kind: int,
        content: memoryview,
        policy: Callable[[str | None], ClientPolicy],
    ) -> list[tuple[int, Event]]:
        """An event as it is to be sent; none for what this version cannot read."""
        self.unread -= 1
        try:
            event = self._decoded(kind, content, policy)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            log.error("%s: event %d was left out: %s", self.folder, number, error)
            self.done([number])
            return []
        self._note_read(number, event)
        before = event.episode_id
        self.translate(event)
        is_moved = event.episode_id != before and getattr(event, "seq", None) is not None
        if is_moved and event.episode_id not in self._started:
            return [(-1, self.start_of(event.episode_id)), (number, event)]
        return [(number, event)]

    def _decoded(
        self, kind: int, content: memoryview, policy: Callable[[str | None], ClientPolicy]
    ) -> Event:
        event: Any
        if kind == _DRAFT:
            policy_id, event = _decode_draft(content)
            for field, is_action in (("obs", False), ("action", True)):
                value = getattr(event, field, None)
                if value is not None and not isinstance(value, bytes):
                    setattr(event, field, Draft(policy(policy_id), is_action, value))
        else:
            event = _decode_event(content)
        if isinstance(event, (LogAction, Decision, LogReturns)) and event.info is not None:
            event.info = msgspec.Raw(msgspec.msgpack.encode(event.info))  # type: ignore[assignment]  # as `encode_info`
        return event  # type: ignore[no-any-return]  # an Event, of either decoder

    def over(self, event: Event) -> None:
        """An end was judged: nothing more is needed of its episode."""
        self.begun.pop(self._origin(event.episode_id)[0], None)

    # --- episodes that were closed meanwhile --------------------------------------------------

    def go_on(self, event: Event, number: int, start: int) -> Start:
        """Let an episode that was closed go on in a new one, from this event; its start."""
        new = hashlib.blake2b(
            f"{event.episode_id}\0{self.instance}\0{start}".encode(), digest_size=16
        ).hexdigest()
        seq = getattr(event, "seq", None) or 1
        step, before = self._steps.get(number), self._origin(event.episode_id)[1]
        step = None if step is None or before is None else step - before
        moved = Moved(event.episode_id, seq, new, start, step, event.ts)
        self._write_needed(_frame(_MOVED, _encode(moved)))
        self._move(moved)
        return self.start_of(new)

    def _move(self, moved: Moved) -> None:
        self.moved[moved.old] = self._into[moved.new] = moved
        self.next_start = max(self.next_start, moved.start + 1)

    def _origin(self, name: str) -> tuple[str, int | None]:
        """The episode that its caller knows, and how many steps of it came before those of `name`
        (None: unknown)."""
        before: int | None = 0
        while (moved := self._into.get(name)) is not None:
            name = moved.old
            before = None if before is None or moved.step is None else before + moved.step
        return name, before

    def start_of(self, new: str) -> Start:
        """The start of an episode in which another one goes on."""
        moved = self._into[new]
        first = self.begun.get(self._origin(new)[0])
        start = Start(episode_id=new, start=moved.start, continues=moved.old, ts=moved.ts)
        if first is not None:
            start.policy_id, start.tags = first.start.policy_id, first.start.tags
            start.schema_id = first.start.schema_id
            start.training_enabled = first.start.training_enabled
        self._started.add(new)
        return start

    def translate(self, event: Event) -> None:
        """Make an event that of the episode in which its own goes on, if it does."""
        while (moved := self.moved.get(event.episode_id)) is not None:
            if isinstance(event, LogReturns) and event.seq is None:
                if event.step is None or moved.step is None or event.step < moved.step:
                    return
                event.step -= moved.step
            elif isinstance(event, Start) or event.seq is None or event.seq < moved.seq:
                return
            else:
                event.seq, event.decided = event.seq - moved.seq + 1, None
            event.episode_id = moved.new

    # --- the end -----------------------------------------------------------------------------

    def let_go(self) -> None:
        """Leave it to others as it is."""
        self._lock.release()

    def close(self, *, forked: bool = False) -> None:
        """Let go of it; one of which nothing is left is removed. `forked`: it is the parent's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if not forked and not self.waiting:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()


class Spool:
    """The segment of this process, and those that it took up.

    One thread at a time calls its methods; its counts may be read by any.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        *,
        sync: bool,
        address: str,
        policy: Callable[[str | None], ClientPolicy],
    ) -> None:
        made = [one for one in (directory, *directory.parents) if not one.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for one in made if sync else ():
            sync_directory(one.parent)
        probe = FileLock(directory / "lock")  # says so at once where there are no locks
        probe.acquire(shared=False, blocking=False)
        probe.release()
        self.directory = directory
        self.address = address
        self.max_bytes = max_bytes
        self._piece_bytes = max(1, min(PIECE_BYTES, max_bytes // 8))
        self._sync = sync
        self._policy = policy
        self.own: SpoolSegment | None = None
        self.taken_up: list[SpoolSegment] = []
        self.unreadable = self.unreadable_own = 0  # events; of those, this process's
        self._instance: str | None = None
        self._has_read_own = False
        self._places: dict[int, tuple[Event, SpoolSegment, int]] = {}

    def close(self, *, forked: bool = False) -> None:
        """Hold nothing any more. `forked`: what is held is the parent's."""
        for segment in self.segments:
            segment.close(forked=forked)
        self.own, self.taken_up, self._instance = None, [], None
        self._places = {}

    @property
    def segments(self) -> list[SpoolSegment]:
        return [*([] if self.own is None else [self.own]), *self.taken_up]

    @property
    def unread(self) -> int:
        """Events that are on disk alone."""
        return sum(segment.unread for segment in self.segments)

    @property
    def own_unread(self) -> int:
        """Those of them that this process has logged."""
        return 0 if self.own is None else self.own.unread

    @property
    def waiting(self) -> int:
        """Events on disk that nobody has acknowledged."""
        return sum(segment.waiting for segment in self.segments)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def append(
        self, events: Sequence[Event], *, left: bool, frames: Iterable[bytes] | None = None
    ) -> bool:
        """Write events down; False when there is no room for them. Raises SpaceError, OSError.

        `frames`: what `framed` made of each.
        """
        data = b"".join(map(framed, events) if frames is None else frames)
        if self.own is None:
            self.own = SpoolSegment.create(self.directory, self._piece_bytes, self._sync)
            self.own.address, self.own.instance = self.address, self._instance
        own = self.own
        if own.nbytes + len(data) > self.max_bytes and own.waiting:
            return False
        first = own.append(data, events, left=left)
        if not left:
            for number, event in enumerate(events, first):
                self._places[id(event)] = (event, own, number)
        if own.moved:
            for event in events:
                own.translate(event)
        return True

    def read(self, most: int) -> list[tuple[Event, str | None]]:
        """The next events that are on disk alone, and the instances that they are sent under.

        This process's and those of the earlier ones take turns, so that neither has an episode wait
        halfway for all of the other's. None: under its own.
        """
        behind = [segment for segment in self.segments if segment.unread]
        if self._has_read_own and len(behind) > 1 and behind[0] is self.own:
            behind = [*behind[1:], behind[0]]
        for segment in behind:
            before = segment.unreadable
            found = segment.read(most, self._policy)
            missing = segment.unreadable - before
            self.unreadable += missing
            self.unreadable_own += missing if segment is self.own else 0
            for number, event in found:
                if number >= 0:
                    self._places[id(event)] = (event, segment, number)
            if found:
                self._has_read_own = segment is self.own
                owner = None if segment is self.own else segment.instance
                return [(event, owner) for _, event in found]
        return []

    def done(self, events: Iterable[Event]) -> None:
        """Events were judged."""
        by_segment: dict[int, tuple[SpoolSegment, list[int]]] = {}
        for event in events:
            place = self._places.pop(id(event), None)
            if place is not None:
                _, segment, number = place
                by_segment.setdefault(id(segment), (segment, []))[1].append(number)
                if isinstance(event, End):
                    segment.over(event)
        for segment, numbers in by_segment.values():
            segment.done(numbers)
            if segment is not self.own and not segment.waiting:
                segment.close()
                self.taken_up.remove(segment)

    def is_spooled(self, event: Event) -> bool:
        return id(event) in self._places

    def segment_of(self, event: Event) -> SpoolSegment:
        return self._places[id(event)][1]

    def go_on(self, event: Event, next_start: int) -> tuple[Start, str | None] | None:
        """Let the episode of a spooled event go on in a new one, from this event.

        Answers its start, and the instance that it is of (None: this process's); `next_start` is
        this process's next number. None where that cannot be written down.
        """
        segment = self.segment_of(event)
        is_own = segment is self.own
        try:
            number = self._places[id(event)][2]
            start = segment.go_on(event, number, next_start if is_own else segment.next_start)
        except OSError as error:
            log.warning("%s: %s", segment.folder, error)
            return None
        return start, None if is_own else segment.instance

    # --- instances ---------------------------------------------------------------------------

    def note_instance(self, instance: str) -> None:
        """The events of this process are sent under this instance. Raises OSError."""
        if self.own is not None:
            self.own.note_instance(instance)
        self._instance = instance

    def renew(self, events: Sequence[Event]) -> None:
        """The instance is forgotten: these events, not sent yet, will be of the next one.

        They are written into a new segment first: a process that is killed in between leaves them
        in both, and the collector takes none of the old one.
        """
        old, self.own, self._instance = self.own, None, None
        if old is None:
            return
        self.taken_up.append(old)
        moving = [event for event in events if id(event) in self._places]
        places = [self._places[id(event)] for event in moving]
        try:
            is_moved = bool(moving) and self.append(moving, left=False)
        except OSError as error:
            log.warning("%s: %s", self.directory, error)
            is_moved = False
        if is_moved:
            old.done(number for _, segment, number in places if segment is old)
        if not old.waiting:
            old.close()
            self.taken_up.remove(old)

    def find(self) -> list[SpoolSegment]:
        """The segments that nobody held, and that are held from here on.

        Those that were sent to another address are left alone.

        Any thread may call it.
        """
        SpoolSegment.sweep(self.directory)
        found = []
        for folder in sorted(self.directory.glob("segment-*")):
            segment = SpoolSegment.take_up(folder, self._piece_bytes, self._sync)
            if segment is None:
                continue
            if segment.instance is not None and segment.address != self.address:
                log.warning("%s: left as it is, for %s", folder, segment.address)
                segment.let_go()  # another collector does not know what it has taken
                continue
            if segment.damaged:
                log.error("%s: %d damaged bytes were left out", folder, segment.damaged)
            if segment.waiting:
                log.warning("%s: %d events of an earlier process", folder, segment.waiting)
                found.append(segment)
            else:
                segment.close()
        return found
