"""The frames that a spool's pieces consist of, and where to read on behind a damaged one.

    mark, kind, length, number, notes, checksum, content (msgpack), mark

`number` counts the segment's events before this frame, so the next intact frame tells how many
events damaged ones had. `notes` counts the notes in force by then (the instance, and episodes that
continue in others), so a reader knows whether one is missing. The CRC-32 covers all but the marks.
The second mark tells a frame that was written whole from one that a kill or a power cut tore.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

HEAD, INSTANCE, DONE, MOVED = range(1, 5)
START, EVENT, DRAFT = range(0xF1, 0xF4)  # far from the others, for `_is_event`
EVENTS = (START, EVENT, DRAFT)

_MARK = b"\xc1\xf3"  # msgpack never uses the first of these
_FIELDS = struct.Struct("<BIQI")
_CHECKSUM = struct.Struct("<I")
_BEFORE = len(_MARK) + _FIELDS.size + _CHECKSUM.size
OVERHEAD = _BEFORE + len(_MARK)
"""The bytes of a frame without its content."""


class SpoolFrame(NamedTuple):
    """An intact frame, from byte `at` to before byte `end` of its data."""

    at: int
    end: int
    kind: int
    number: int
    notes: int
    content: memoryview


def framed(kind: int, content: bytes, number: int, notes: int) -> bytes:
    """The bytes of a frame."""
    fields = _FIELDS.pack(kind, len(content), number, notes)
    checksum = zlib.crc32(content, zlib.crc32(fields))
    return b"".join((_MARK, fields, _CHECKSUM.pack(checksum), content, _MARK))


def size_of_first(data: bytes) -> int:
    """The size of the frame at the beginning, which may be damaged; 0 if it is cut short."""
    if len(data) < _BEFORE:
        return 0
    return OVERHEAD + int(_FIELDS.unpack_from(data, len(_MARK))[1])


def frame_at(data: bytes, at: int) -> SpoolFrame | None:
    """The frame at a position; None if it is damaged or not whole.

    No frame is empty: zeros, to which a power cut may extend a file, would be one that is intact.
    """
    begin = at + _BEFORE
    if begin > len(data):
        return None
    view, fields = memoryview(data), at + len(_MARK)
    kind, length, number, notes = _FIELDS.unpack_from(view, fields)
    end = begin + length + len(_MARK)
    if not length or end > len(view):
        return None
    content = view[begin : begin + length]
    checksum = zlib.crc32(content, zlib.crc32(view[fields : fields + _FIELDS.size]))
    if _CHECKSUM.unpack_from(view, fields + _FIELDS.size)[0] != checksum:
        return None
    return SpoolFrame(at, end, kind, number, notes, content)


def frames(data: bytes, at: int = 0) -> Iterator[SpoolFrame]:
    """Yield the frames from a position on, up to the first that is damaged or not whole."""
    while (frame := frame_at(data, at)) is not None:
        yield frame
        at = frame.end


def behind_damage(data: bytes, at: int) -> int | None:
    """The position of the next intact frame behind the damaged one at `at`; None without one.

    The damaged frame's own length comes first: its content might contain the bytes of a frame.
    """
    end = at + size_of_first(data[at : at + _BEFORE])
    if end > at and frame_at(data, end) is not None:
        return end
    while (at := data.find(_MARK, at + 1)) >= 0:
        if frame_at(data, at) is not None:
            return at
    return None


def intact_frames(data: bytes) -> Iterator[SpoolFrame]:
    """Yield all intact frames of a piece; damaged ones in between are passed over."""
    at: int | None = 0
    while at is not None:
        end = at
        for frame in frames(data, at):
            yield frame
            end = frame.end
        at = behind_damage(data, end)


def is_torn(rest: bytes) -> bool:
    """Whether the end of a piece, behind its intact frames, is one that was not written whole."""
    written = rest.rstrip(b"\0")
    if len(written) < OVERHEAD:
        return True
    is_cut = written.startswith(_MARK) and size_of_first(written) > len(written)
    return is_cut and not written.endswith(_MARK)


def events_in(rest: bytes) -> int:
    """About how many events the damaged frames at the end of a piece had."""
    first, *others = rest.rstrip(b"\0").split(2 * _MARK)
    kinds = (first[len(_MARK) :], *others)
    return sum(_is_event(kind[:1]) for kind in kinds)


def _is_event(kind: bytes) -> bool:
    """Whether a kind, in which a bit may be wrong, is that of an event."""
    return (int.from_bytes(kind, "little") >> 4).bit_count() > 1
