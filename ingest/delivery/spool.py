"""The spool: a client's events on disk until they are acknowledged (`on_full="spool"`).

A process writes one *segment*: a folder under the spool's directory, whose lock it holds while it
runs. An event is in its segment before its call returns, so SIGKILL loses none; with `sync` it is
synced to the disk and also survives a power failure. Events that do not fit in memory are read back
from there. Acknowledgements are noted, and files without remaining events are removed.

The next process takes over segments that no process holds, and delivers them under the instance
that they name, so that the collector recognises events that it has already. A segment without an
instance, whose process never reached the collector, gets one before its first event is sent.

    segment-PID-RANDOM/lock
    segment-PID-RANDOM/reserve           space on a full disk, for notes that must precede a send
    segment-PID-RANDOM/00000000, ...     pieces of frames (ingest.delivery.spool_frames)
    damaged-segment-PID-RANDOM-00000000  a damaged piece, once its other events are delivered

The first frame of a piece has the state from earlier pieces. That frame, the instance and moved
episodes are written twice, because without them no event can be delivered safely. A damaged frame
of an event is one lost event, and reading goes on behind it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ingest.delivery.batches import LONGEST_RUN
from ingest.delivery.declarations import ClientPolicy, Draft
from ingest.delivery.spool_frames import (
    DONE,
    DRAFT,
    EVENT,
    EVENTS,
    HEAD,
    INSTANCE,
    MOVED,
    OVERHEAD,
    START,
    SpoolFrame,
    behind_damage,
    events_in,
    frame_at,
    framed,
    frames,
    intact_frames,
    is_torn,
    size_of_first,
)
from ingest.protocol.messages import Decision, End, Event, LogAction, LogReturns, Start
from storage.errors import NewerFormat
from storage.experience.range_set import RangeSet
from storage.spaces.descriptors import SpaceError
from storage.system.files import FileLock, sync_directory
from storage.system.formats import require_format
from storage.wording import counted

log = logging.getLogger("headrace.client")

PIECE_BYTES = 8_000_000
FORMAT_VERSION = 1
_READ_BYTES = 262_144
_RESERVE = "reserve"
_RESERVE_BYTES = 65_536
_ARRAY = 1  # the msgpack extension of an array in a draft
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class Begun(msgspec.Struct, array_like=True, frozen=True):
    """An open episode: its start, and its number of steps so far (None: an event was damaged)."""

    start: Start
    steps: int | None


class _Head(msgspec.Struct, array_like=True):
    """`address` is the collector's, `begun` the open episodes at that point.

    `notes_removal`: it is noted that the events of removed pieces were judged, so that pieces that
    were lost can be told from these.
    """

    address: str
    instance: str | None
    next_start: int
    begun: list[Begun]
    moved: list[Moved]
    format: int = FORMAT_VERSION
    notes_removal: bool = False


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """Events of episode `old` from `seq` on belong to the episode `new`, which has start `start`.

    `step` is the number of its first step in `old` (None: unknown), `ts` that step's time.
    """

    old: str
    seq: int
    new: str
    start: int
    step: int | None
    ts: int | None


def _packed(value: Any) -> Any:
    """Encode types that msgpack lacks: drafts, and arrays (or a range) in them."""
    if isinstance(value, Draft):
        return value.value
    try:
        array = np.asarray(value)
    except Exception:  # any error: the value is the caller's
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


def encoded(event: Event) -> tuple[int, bytes]:
    """The kind and content of an event's frame. Raises SpaceError for a value without encoding."""
    values = (getattr(event, "obs", None), getattr(event, "action", None))
    drafts = [value for value in values if type(value) is Draft]
    try:
        if drafts:
            return DRAFT, _encode((drafts[0].policy.policy_id, event))
        return START if type(event) is Start else EVENT, _encode(event)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SpaceError(f"Episode {event.episode_id}: cannot be spooled: {error}") from error


@dataclass
class _Piece:
    path: Path
    base: int  # the number of its first event
    size: int = 0
    is_damaged: bool = False

    @property
    def serial(self) -> int:
        return int(self.path.name)


class SpoolSegment:
    """The events of one process, in order, numbered from 0.

    `unread` counts the events that are only on disk. They are sent under `instance`, whose next
    start has the number `next_start`.
    """

    def __init__(self, folder: Path, lock: FileLock, piece_bytes: int, sync: bool) -> None:
        self.folder = folder
        self.address = ""
        self.instance: str | None = None
        self.next_start = 0
        self.unread = 0
        self.unreadable = 0  # events
        self.lost = 0  # events in pieces that were not there when it was taken up
        self.is_gone = False  # its files are not at their paths any more
        self.begun: dict[str, Begun] = {}  # open episodes, as of the events read
        self.moved: dict[str, Moved] = {}
        self._into: dict[str, Moved] = {}  # the same by their new episodes
        self.damaged = 0  # bytes
        self.lacks_notes = False  # which of its events were sent, and how, is unknown
        self.is_foreign = False  # of an earlier process
        self._lock = lock
        self._piece_bytes = piece_bytes
        self._sync = sync
        self._next = 0
        self._done = RangeSet()
        self._has_head = False  # one has been scanned
        self._notes_removal = True  # as each of its heads says
        self._absent: list[tuple[int, int]] = []  # the events of absent pieces
        self._stays = False  # a damaged piece could not be renamed
        self._pieces: deque[_Piece] = deque()
        self._written: dict[str, Begun] = {}  # open episodes, as of the events written
        self._steps: dict[int, int] = {}  # step numbers of actions that were read and not judged
        self._started: set[str] = set()  # moved episodes whose start has been read
        self._fd = -1
        self._file: os.stat_result | None = None  # which file that is
        self._reading = (0, 0, 0)  # (a piece's serial, position in it, number of the event)

    @classmethod
    def create(cls, directory: Path, piece_bytes: int, sync: bool) -> SpoolSegment:
        while True:
            folder = directory / f"segment-{os.getpid()}-{secrets.token_hex(6)}"
            folder.mkdir()
            lock = FileLock(folder / "lock")
            try:
                if lock.acquire(blocking=False):  # else another process removes the empty folder
                    (folder / _RESERVE).write_bytes(bytes(_RESERVE_BYTES))
                    break
            except FileNotFoundError:  # it has removed it
                lock.release()
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
                raise
        if sync:
            sync_directory(directory)
        return cls(folder, lock, piece_bytes, sync)

    @classmethod
    def take_up(cls, folder: Path, piece_bytes: int, sync: bool) -> SpoolSegment | None:
        """Take over a segment; None if another process holds it."""
        lock = FileLock(folder / "lock")
        try:
            if not lock.acquire(blocking=False):
                return None
            segment = cls(folder, lock, piece_bytes, sync)
            segment.is_foreign = True
            segment._scan()
        except (OSError, msgspec.MsgspecError, NewerFormat) as error:  # removed, or not a segment
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
        """The number of events that are not acknowledged."""
        return self._next - len(self._done)

    @property
    def notes(self) -> int:
        """The number of notes in force, without which no event can be sent."""
        return (self.instance is not None) + len(self.moved)

    # --- writing -----------------------------------------------------------------------------

    def append(
        self, contents: Iterable[tuple[int, bytes]], events: Sequence[Event], *, left: bool
    ) -> int:
        """Write events; return the number of the first. `left`: they will be read back from here.

        `contents`: the result of `encoded` for each event. Raises OSError, with nothing written.
        """
        numbered, notes = enumerate(contents, self._next), self.notes
        self._write(b"".join(framed(kind, data, at, notes) for at, (kind, data) in numbered))
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
        """Update the open episodes with an event; return the step number of an action."""
        if isinstance(event, Start):
            self.next_start = max(self.next_start, (event.start or 0) + 1)
            if event.agent_id is None:
                begun[event.episode_id] = Begun(event, 0)
        elif isinstance(event, (LogAction, Decision)):
            found = begun.get(event.episode_id)
            if found is not None and found.steps is not None:
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
        """Write the instance under which events are sent from now on. Raises OSError."""
        self._write_needed(INSTANCE, instance)
        self.instance = instance

    def done(self, numbers: Iterable[int]) -> None:
        """Note that events were judged, and remove files without remaining events."""
        numbers = sorted(numbers)
        judged = RangeSet.of(numbers)
        self._done.update(judged)
        for number in numbers:
            self._steps.pop(number, None)
        self._note_done(judged.ranges())
        judged_pieces = self._judged_pieces()
        if not judged_pieces:
            return
        before = [(0, self._pieces[judged_pieces].base - 1)]
        is_noted = self._note_done(before)
        for _ in range(judged_pieces):
            if not self._remove(self._pieces[0]):
                return
            self._pieces.popleft()
        if not is_noted:  # the disk was full
            self._note_done(before)

    def _note_done(self, ranges: list[tuple[int, int]]) -> bool:
        """Note judged events, without a sync; without the note they are sent again, and recognised.

        Returns False if it cannot be written.
        """
        try:
            self._write(self._framed(DONE, ranges), sync=False)
        except OSError:
            return False
        return True

    def _judged_pieces(self) -> int:
        """The number of pieces without remaining events before the first one that stays."""
        for place, (piece, following) in enumerate(pairwise(self._pieces)):
            empty = following.base <= piece.base
            if not empty and not self._done.contains_range(piece.base, following.base - 1):
                return place
        return max(0, len(self._pieces) - 1)

    def _remove(self, piece: _Piece) -> bool:
        """Remove a piece without remaining events. A damaged one is renamed instead.

        Returns False if that fails. Then the later pieces stay too, because they have the notes
        that its events were judged.
        """
        if not piece.is_damaged:
            with contextlib.suppress(OSError):  # it is not read again
                piece.path.unlink(missing_ok=True)
            return True
        kept = self.folder.with_name(f"damaged-{self.folder.name}-{piece.path.name}")
        try:
            piece.path.rename(kept)
        except OSError as error:
            if not self._stays:
                log.error("%s: the damaged file cannot be renamed: %s", piece.path, error)
            self._stays = True
            return False
        log.error("%s: the damaged file is kept as %s", self.folder, kept)
        return True

    def _framed(self, kind: int, value: Any) -> bytes:
        return framed(kind, _encode(value), self._next, self.notes)

    def _write_needed(self, kind: int, value: Any) -> None:
        """Write a note that must be on disk before the next event is sent, twice.

        On a full disk this uses the reserve, because only sending frees space.
        """
        frame = 2 * self._framed(kind, value)
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
        """Begin the next piece with a frame that has the state from earlier pieces."""
        serial = self._pieces[-1].serial + 1 if self._pieces else 0
        path = self.folder / f"{serial:08d}"
        head = _Head(
            self.address,
            self.instance,
            self.next_start,
            list(self._written.values()),
            list(self.moved.values()),
            notes_removal=self._notes_removal,
        )
        data = 2 * self._framed(HEAD, head)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(f"{path}: the disk has no space for the first frame")
            if self._sync:
                _sync(fd)
                sync_directory(self.folder)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._file = fd, os.fstat(fd)
        self._pieces.append(_Piece(path, self._next, len(data)))

    # --- reading -----------------------------------------------------------------------------

    def _scan(self) -> None:
        """Read an earlier process's segment: its events, and which of them were judged."""
        notes, lost_at_end = 0, 0
        for path in sorted(one for one in self.folder.iterdir() if one.name.isdigit()):
            data = path.read_bytes()
            piece = _Piece(path, self._next, len(data))
            end = 0
            for frame in intact_frames(data):
                if not end:
                    piece.base = self._begin(piece, frame)
                piece.is_damaged |= frame.at > end
                self.damaged += frame.at - end
                self._scan_frame(frame)
                notes, end = max(notes, frame.notes), frame.end
            rest = data[end:]
            self.damaged += len(rest)
            piece.is_damaged |= not is_torn(rest)
            if not (end or piece.is_damaged):
                path.unlink()
                continue
            self._pieces.append(piece)
            lost_at_end = 0 if is_torn(rest) else events_in(rest)
        self._next += lost_at_end  # behind other pieces the next one's head tells how many
        self.next_start += lost_at_end
        for first, last in self._absent:
            if self._notes_removal:  # release 0.1.0 does not
                self.lost += len(self._done.missing(first, last))
            self._done.add_range(first, last)
        self.lacks_notes = notes > self.notes or bool(self.notes and not self._has_head)
        if self._pieces:
            self._reading = (self._pieces[0].serial, 0, self._pieces[0].base)
        self.unread = self.waiting

    def _begin(self, piece: _Piece, first: SpoolFrame) -> int:
        """The number of a piece's first event. Those of absent pieces before it are noted."""
        if piece.serial == (self._pieces[-1].serial + 1 if self._pieces else 0):
            return first.number if first.kind == HEAD else self._next
        base = first.number if first.kind == HEAD else max(self._next, first.number - 1)
        if base > self._next:
            self._absent.append((self._next, base - 1))
            self._next = base
        return base

    def _scan_frame(self, frame: SpoolFrame) -> None:
        kind, content = frame.kind, frame.content
        if frame.number > self._next:  # each of the events in between may be a start
            self.next_start += frame.number - self._next
            self._next = frame.number
        if kind == HEAD:
            head = _decode_head(content)
            require_format({"format": head.format}, FORMAT_VERSION, self.folder)
            if not self._has_head:  # of a later piece, it counts steps that are read again
                self.begun = {
                    one.start.episode_id: Begun(one.start, None) if self._pieces else one
                    for one in head.begun
                }
            self._has_head = True
            self._notes_removal = head.notes_removal
            self.address, self.instance = head.address, head.instance
            self.next_start = max(self.next_start, head.next_start)
            for one in head.moved:
                self._move(one)
        elif kind in EVENTS:
            self._next = frame.number + 1
            if kind == START:
                start = _decode_event(content)
                if isinstance(start, Start):
                    self.next_start = max(self.next_start, (start.start or 0) + 1)
        elif kind == INSTANCE:
            self.instance = msgspec.msgpack.decode(content)
        elif kind == DONE:
            for first, last in _decode_done(content):
                self._done.add_range(first, last)
        elif kind == MOVED:
            self._move(_decode_moved(content))

    def give_up(self) -> int:
        """Count all waiting events as done, because notes are missing; return their number."""
        missing = self.waiting
        if missing:
            self._done.add_range(0, self._next - 1)
        self.unread = 0
        for piece in self._pieces:
            piece.is_damaged = True
        return missing

    def read(
        self, most: int, policy: Callable[[str | None], ClientPolicy]
    ) -> list[tuple[int, Event]]:
        """The next unread events with their numbers; empty at the end.

        It reads about `most` events or 256 kB, and then up to 8 more that complete an episode or a
        step's rewards, because an episode that is sent in two halves may be abandoned in between.
        An event that was moved to another episode gets that one's id; the start of that episode
        comes before it, with number -1. After an unexpected error the next read returns the same
        events.
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
            try:
                data = b"" if piece is None else self._chunk(piece, at)
            except OSError as error:
                self._pass_on(serial, number, error)
                continue
            for frame in frames(data):
                is_event = frame.kind in EVENTS
                if is_event and self._is_whole(found, most, frame.kind):
                    return found
                if frame.number > number:
                    self._lose(range(number, frame.number))
                number = frame.number + is_event
                self._reading = (serial, at + frame.end, number)
                if is_event and frame.number in self._done:
                    self._pass_over(frame.kind, frame.content, policy)
                elif is_event:
                    found += self._entered(frame.number, frame.kind, frame.content, policy)
                    nbytes += len(frame.content)
                    if nbytes >= _READ_BYTES:
                        most = min(most, max(1, len(found)))
            if self._reading == before:
                self._recover(piece, data)
        return found

    def _recover(self, piece: _Piece | None, data: bytes) -> None:
        """Continue reading behind damaged frames, or behind a piece.

        `data` is the rest of the piece.
        """
        serial, at, number = self._reading
        behind = behind_damage(data, 0)
        if piece is not None and data:
            piece.is_damaged = piece.is_damaged or behind is not None or not is_torn(data)
        if behind is None:
            self._pass_on(serial, number)
        else:
            self._reading = (serial, at + behind, number)

    def _lose(self, numbers: range) -> None:
        """Count damaged events as done, and as unreadable unless they were judged before.

        An action of any episode may be among them, so the numbers of later steps are unknown.
        """
        self.begun = {name: Begun(one.start, None) for name, one in self.begun.items()}
        missing = [number for number in numbers if number not in self._done]
        if missing:
            log.error("%s: %s cannot be read: damaged", self.folder, counted(len(missing), "event"))
            self.unreadable += len(missing)
            self.unread -= len(missing)
            self.done(missing)

    def _pass_on(self, serial: int, number: int, error: OSError | None = None) -> None:
        """Continue reading after a piece. After an error its events stay for the next process."""
        following = next((one for one in self._pieces if one.serial > serial), None)
        end = self._next if following is None else following.base
        missing = sum(one not in self._done for one in range(number, end))
        if missing and error is not None:
            amount = counted(missing, "event")
            log.error("%s: %s cannot be read: %s", self.folder, amount, error)
            self.unreadable += missing
            self.unread -= missing
        elif missing:
            for piece in self._pieces:
                piece.is_damaged |= piece.serial == serial
            self._lose(range(number, end))
        if following is not None:
            self._reading = (following.serial, 0, following.base)
        else:
            self.unread = 0
            self._reading = (serial, self._pieces[-1].size if self._pieces else 0, self._next)

    @staticmethod
    def _is_whole(found: Sequence[tuple[int, Event]], most: int, following: int) -> bool:
        """Whether a read may end before the next frame, of kind `following`."""
        if len(found) < most:
            return False
        is_rewarded = not isinstance(found[-1][1], (LogAction, Decision))
        return following == START or (len(found) >= most + LONGEST_RUN and is_rewarded)

    def _chunk(self, piece: _Piece, at: int) -> bytes:
        """Some complete frames of a piece from a position on; its whole rest if the first frame is
        damaged."""
        with piece.path.open("rb") as file:
            file.seek(at)
            data = file.read(_READ_BYTES)
            size = size_of_first(data)
            if size > len(data) and at + size <= piece.size:
                data += file.read(size - len(data))
            if frame_at(data, 0) is None:
                data += file.read()
        return data

    def _pass_over(
        self, kind: int, content: memoryview, policy: Callable[[str | None], ClientPolicy]
    ) -> None:
        """Skip an event that was judged; note what later events of its episode need."""
        with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            self._note(self.begun, self._decoded(kind, content, policy))

    def _entered(
        self,
        number: int,
        kind: int,
        content: memoryview,
        policy: Callable[[str | None], ClientPolicy],
    ) -> list[tuple[int, Event]]:
        """An event as it is sent; empty if this version cannot read it."""
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
        if is_moved and event.episode_id not in self._started and self.knows_start(event):
            return [(-1, self.start_of(event.episode_id)), (number, event)]
        return [(number, event)]

    def _decoded(
        self, kind: int, content: memoryview, policy: Callable[[str | None], ClientPolicy]
    ) -> Event:
        event: Any
        if kind == DRAFT:
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
        """Forget the episode of an end that was judged."""
        self.begun.pop(self._origin(event.episode_id)[0], None)

    # --- episodes that were closed meanwhile --------------------------------------------------

    def go_on(self, event: Event, number: int, start: int) -> Start | None:
        """Continue a closed episode in a new one, from this event; return the new start, if any."""
        if not self.knows_start(event):
            return None
        new = hashlib.blake2b(
            f"{event.episode_id}\0{self.instance}\0{start}".encode(), digest_size=16
        ).hexdigest()
        seq = getattr(event, "seq", None) or 1
        step, before = self._steps.get(number), self._origin(event.episode_id)[1]
        step = None if step is None or before is None else step - before
        moved = Moved(event.episode_id, seq, new, start, step, event.ts)
        try:
            self._write_needed(MOVED, moved)
        except OSError as error:
            log.warning("%s: %s", self.folder, error)
            return None
        self._move(moved)
        return self.start_of(new)

    def _move(self, moved: Moved) -> None:
        self.moved[moved.old] = self._into[moved.new] = moved
        self.next_start = max(self.next_start, moved.start + 1)

    def knows_start(self, event: Event) -> bool:
        """Whether the start of an event's episode is known, so that the episode can go on."""
        return self._origin(event.episode_id)[0] in self.begun

    def _origin(self, name: str) -> tuple[str, int | None]:
        """(the caller's episode behind `name`, the number of its earlier steps or None)."""
        before: int | None = 0
        while (moved := self._into.get(name)) is not None:
            name = moved.old
            before = None if before is None or moved.step is None else before + moved.step
        return name, before

    def start_of(self, new: str) -> Start:
        """The start of an episode that continues another one."""
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
        """Give an event the id of the episode that its own continues in, if there is one."""
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

    # --- files that are gone ------------------------------------------------------------------

    def is_there(self, *, as_a_whole: bool = True) -> bool:
        """Whether the file that is written is the one at its path, and the others are there.

        Raises OSError if that cannot be found out.
        """
        try:
            if self._file and not os.path.samestat(os.stat(self._pieces[-1].path), self._file):
                return False
            for piece in self._pieces if as_a_whole else ():
                os.stat(piece.path)
            return not as_a_whole or self._lock.has_name
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise

    def carry_on(self, old: SpoolSegment, numbered: Sequence[tuple[int, Event]]) -> None:
        """Continue a segment whose files are gone: write those of its events that are in memory.

        `numbered` are these events in order, with their numbers in `old`. Raises OSError.
        """
        self.address, self.instance, self.next_start = old.address, old.instance, old.next_start
        self.is_foreign, self.moved, self._into = old.is_foreign, old.moved, old._into
        self._started = old._started
        again = Counter(
            old._origin(event.episode_id)[0] for number, event in numbered if number in old._steps
        )
        for name, one in old.begun.items():  # as before these events
            steps = None if one.steps is None else one.steps - again[name]
            self._written[name] = Begun(one.start, steps)
        events = [event for _, event in numbered]
        first = self.append(map(encoded, events), events, left=False)
        self._steps = {
            place: old._steps[number]
            for place, (number, _) in enumerate(numbered, first)
            if number in old._steps
        }
        self.begun, self._written = dict(old.begun), dict(old._written)
        if old.unread:  # any episode may lack some of these
            for known in (self.begun, self._written):
                known.update({name: Begun(one.start, None) for name, one in known.items()})

    # --- the end -----------------------------------------------------------------------------

    def let_go(self) -> None:
        """Release the segment unchanged for other processes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.release()

    def close(self, *, forked: bool = False) -> None:
        """Release the segment, and remove an empty one. `forked`: it is the parent's."""
        if not forked and not self.waiting and all(map(self._remove, self._pieces)):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.let_go()


class Spool:
    """The segment of this process, and those that it took over.

    Call its methods from one thread at a time; any thread may read its counts.
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
        _make(directory, sync)
        probe = FileLock(directory / "lock")  # fails at once on systems without file locks
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
        self.unreadable = self.unreadable_own = 0  # events; those of this process
        self._instance: str | None = None
        self._has_read_own = False
        self.stranded = 0  # events in memory whose files are gone, and cannot be written again
        self._places: dict[int, tuple[Event, SpoolSegment, int]] = {}

    def close(self, *, forked: bool = False) -> None:
        """Release all segments. `forked`: they are the parent's."""
        for segment in self.segments:
            segment.close(forked=forked)
        self.own, self.taken_up, self._instance = None, [], None
        self._places, self.stranded = {}, 0

    @property
    def segments(self) -> list[SpoolSegment]:
        return [*([] if self.own is None else [self.own]), *self.taken_up]

    @property
    def unread(self) -> int:
        """The number of events that are only on disk."""
        return sum(segment.unread for segment in self.segments)

    @property
    def own_unread(self) -> int:
        """The number of these that this process has logged."""
        return 0 if self.own is None else self.own.unread

    @property
    def waiting(self) -> int:
        """The number of events on disk that are not acknowledged."""
        return sum(segment.waiting for segment in self.segments)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def append(
        self,
        events: Sequence[Event],
        *,
        left: bool,
        contents: Sequence[tuple[int, bytes]] | None = None,
    ) -> bool:
        """Write events; return False if the spool is full. Raises SpaceError, OSError.

        `contents`: the result of `encoded` for each event.
        """
        if self.own is not None and not self.own.is_there(as_a_whole=False):
            self.replace_gone()
        contents = list(map(encoded, events)) if contents is None else contents
        nbytes = sum(OVERHEAD + len(content) for _, content in contents)
        if self.own is None:
            self.own = SpoolSegment.create(self.directory, self._piece_bytes, self._sync)
            self.own.address, self.own.instance = self.address, self._instance
        own = self.own
        if own.nbytes + nbytes > self.max_bytes and own.waiting:
            return False
        first = own.append(contents, events, left=left)
        if not left:
            for number, event in enumerate(events, first):
                self._places[id(event)] = (event, own, number)
        if own.moved:
            for event in events:
                own.translate(event)
        return True

    def replace_gone(self) -> None:
        """Make new files for events in memory whose own were removed, moved or replaced.

        Events that were only in those files are counted as unreadable. Raises OSError if no files
        can be made; the events are `stranded` then.
        """
        for segment in self.segments:
            if segment.is_there():
                continue
            numbered = [
                (number, event) for event, one, number in self._places.values() if one is segment
            ]
            if numbered or segment is self.own:
                self._replace(segment, sorted(numbered, key=itemgetter(0)))

    def _replace(self, old: SpoolSegment, numbered: Sequence[tuple[int, Event]]) -> None:
        if not old.is_gone:
            kept = counted(len(numbered), "unsent event")
            why = "it was removed, moved or replaced while it was in use"
            log.error("%s: %s; %s in memory", old.folder, why, kept)
        old.is_gone, self.stranded = True, len(numbered)
        _make(self.directory, self._sync)
        new = SpoolSegment.create(self.directory, self._piece_bytes, self._sync)
        try:
            new.carry_on(old, numbered)
        except BaseException:
            new.let_go()
            shutil.rmtree(new.folder, ignore_errors=True)
            raise
        for number, (_, event) in enumerate(numbered):
            self._places[id(event)] = (event, new, number)
        if old is self.own:
            self.own = new
            self.unreadable_own += old.unread
        else:
            self.taken_up[self.taken_up.index(old)] = new
        self.unreadable += old.unread
        self.stranded = 0
        old.let_go()
        kept, lost = counted(len(numbered), "event"), counted(old.unread, "event")
        log.error("%s: wrote %s again; %s had been only in the old files", new.folder, kept, lost)

    def read(self, most: int) -> list[tuple[Event, str | None]]:
        """The next events that are only on disk, with their instances (None: this process's).

        Reads alternate between this process's events and those of earlier ones, so that no episode
        waits in its middle for all events of the others.
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
            self._close_empty(segment)
            if found:
                self._has_read_own = segment is self.own
                owner = None if segment is self.own else segment.instance
                return [(event, owner) for _, event in found]
        return []

    def is_foreign(self, instance: str | None, event: Event | None = None) -> bool:
        """Whether an instance is that of an earlier process; with `event`, whether it is an event
        of one. This process's rewards for an earlier one's episode are sent under its instance."""
        place = self._places.get(id(event))
        if place is not None:
            return place[1].is_foreign
        return any(one.is_foreign and one.instance == instance for one in self.taken_up)

    def done(self, events: Iterable[Event]) -> None:
        """Note that events were judged."""
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
            self._close_empty(segment)

    def _close_empty(self, segment: SpoolSegment) -> None:
        """Remove an earlier segment without remaining events."""
        if segment is not self.own and not segment.waiting:
            segment.close()
            self.taken_up.remove(segment)

    def is_spooled(self, event: Event) -> bool:
        return id(event) in self._places

    def segment_of(self, event: Event) -> SpoolSegment:
        return self._places[id(event)][1]

    def go_on(self, event: Event, next_start: int) -> tuple[Start, str | None] | None:
        """Continue the episode of a spooled event in a new one, from this event.

        Returns its start and the start's instance (None: this process's), or None if that cannot be
        written to disk, or if the first start was damaged. `next_start` is this process's next
        number.
        """
        _, segment, number = self._places[id(event)]
        is_own = segment is self.own
        start = segment.go_on(event, number, next_start if is_own else segment.next_start)
        return None if start is None else (start, None if is_own else segment.instance)

    # --- instances ---------------------------------------------------------------------------

    def note_instance(self, instance: str) -> None:
        """Send this process's events under an instance from now on. Raises OSError."""
        if self.own is not None:
            self.own.note_instance(instance)
        self._instance = instance

    def renew(self, events: Sequence[Event]) -> None:
        """Move events that were not sent to a new segment, for the next instance.

        A process that is killed meanwhile leaves them in both segments; the collector accepts none
        of the old one, because it does not know its instance.
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
        self._close_empty(old)

    def find(self) -> list[SpoolSegment]:
        """Take over and return the segments that no process holds.

        Segments of another collector's address are left alone. Any thread may call it.
        """
        found = []
        for folder in sorted(self.directory.glob("segment-*")):
            segment = SpoolSegment.take_up(folder, self._piece_bytes, self._sync)
            if segment is None:
                continue
            was_sent = segment.instance is not None or segment.lacks_notes
            if was_sent and segment.address not in ("", self.address):
                log.warning("%s: left as it is: its events are for %s", folder, segment.address)
                segment.let_go()  # this collector does not know which events that one has
                continue
            segment.address = self.address  # noted on disk with the next write
            if segment.damaged:
                amount = counted(segment.damaged, "damaged byte was", "damaged bytes were")
                log.error("%s: %s skipped", folder, amount)
            if segment.lost:
                self.unreadable += segment.lost
                amount = counted(segment.lost, "event")
                log.error("%s: %s cannot be read: their files are missing", folder, amount)
            if segment.lacks_notes:
                missing = segment.give_up()
                self.unreadable += missing
                why = "the notes of how they were sent are damaged"
                log.error("%s: %s left out: %s", folder, counted(missing, "event"), why)
            if segment.waiting:
                amount = counted(segment.waiting, "unsent event")
                log.warning("%s: %s of an earlier process", folder, amount)
                found.append(segment)
            else:
                segment.close()
        return found


def _make(directory: Path, sync: bool) -> None:
    """Make a folder, and those that it is in."""
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for one in made if sync else ():
        sync_directory(one.parent)
