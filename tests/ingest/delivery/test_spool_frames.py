"""A spool's frames: what is intact is found again, whatever is damaged or cut off around it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ingest.delivery.spool_frames import (
    DONE,
    EVENT,
    EVENTS,
    HEAD,
    INSTANCE,
    MOVED,
    OVERHEAD,
    START,
    events_in,
    frame_at,
    framed,
    intact_frames,
    is_torn,
)

KINDS = (HEAD, INSTANCE, DONE, MOVED, *EVENTS)
CONTENTS = (b"\x93a", msgspec.msgpack.encode({"x": bytes(40)}), b"\xc1\xc1", b"\0")
PIECE = [(HEAD, CONTENTS[0], 5, 1), (START, CONTENTS[1], 5, 1), (EVENT, CONTENTS[2], 6, 1)]
PIECE += [(DONE, CONTENTS[0], 7, 1), (EVENT, CONTENTS[3], 7, 1)]


def written() -> bytes:
    return b"".join(framed(*values) for values in PIECE)


def found(data: bytes) -> list[tuple[int, bytes, int, int]]:
    return [(one.kind, bytes(one.content), one.number, one.notes) for one in intact_frames(data)]


def flipped(data: bytes, bit: int) -> bytes:
    content = bytearray(data)
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.binary(min_size=1),
            st.integers(0, 2**63),
            st.integers(0, 2**31),
        )
    )
)
def test_frames_are_read_as_they_were_written(values: list[tuple[int, bytes, int, int]]) -> None:
    """Whatever their content is."""
    data = b"".join(framed(*one) for one in values)
    assert found(data) == values
    assert len(data) == sum(OVERHEAD + len(content) for _, content, _, _ in values)


def test_a_flipped_bit_spoils_its_own_frame_alone() -> None:
    """All others are found. A bit of a mark spoils nothing."""
    data, spoiled = written(), 0
    for bit in range(8 * len(data)):
        left = found(flipped(data, bit))
        missing = [one for one in PIECE if one not in left]
        assert left == [one for one in PIECE if one not in missing]
        assert len(missing) <= 1
        spoiled += len(missing)
    assert spoiled == 8 * (len(data) - 4 * len(PIECE))


def test_a_frame_within_content_is_not_found_instead_of_the_next_one() -> None:
    """Content that has the bytes of a frame is damaged: its own length leads to the next frame."""
    inner = framed(EVENT, CONTENTS[1], 8, 1)
    first, last = framed(EVENT, inner + b"x", 7, 1), (EVENT, CONTENTS[0], 8, 1)
    assert found(flipped(first, 8 * (len(first) - 3)) + framed(*last)) == [last]


def test_a_frame_that_was_not_written_whole_is_torn() -> None:
    """A kill leaves the beginning of a write, and a power cut may add zeros: what is there before
    is intact, and the rest is not taken for damage."""
    data = written()
    ends = [0, *(frame.end for frame in intact_frames(data))]
    for size in range(len(data) + 1):
        whole = sum(end <= size for end in ends) - 1
        for zeros in (0, 1, 600):
            cut = data[:size] + bytes(zeros)
            left = found(cut)
            assert left == PIECE[: len(left)]
            assert len(left) in (whole, whole + 1)  # the zeros may complete a frame
            assert is_torn(cut[ends[len(left)] :])


def test_a_damaged_last_frame_is_not_torn() -> None:
    """A bit of it flips, anywhere but in its marks: it counts as an event if it was one."""
    for kind in KINDS:
        last = framed(kind, CONTENTS[0], 8, 1)
        for bit in range(16, 8 * (len(last) - 2)):
            rest = flipped(last, bit)
            assert frame_at(rest, 0) is None
            assert not is_torn(rest)
            assert events_in(rest) == (kind in EVENTS)


def test_several_damaged_frames_at_the_end_are_counted() -> None:
    """By their marks, as their lengths may be wrong."""
    last = [framed(kind, CONTENTS[1], 8, 1) for kind in (START, EVENT, DONE, EVENT)]
    assert events_in(b"".join(flipped(frame, 8 * 30) for frame in last)) == 3
