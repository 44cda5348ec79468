"""Values and canonical bytes are the same thing; what is not a value is a SpaceError.

Also of `storage.spaces.leaves`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
    Text,
    Tuple,
    parse_space,
)
from storage.spaces.leaves import QuickInteger, QuickNumbers
from tests.storage.space_strategies import spaces, values


def general(space: Space) -> Codec:
    """A codec without its short cuts."""
    codec = Codec(space)
    for slot in codec._slots:
        object.__setattr__(slot, "quick", None)
    return codec


def outcome(codec: Codec, value: Any, check_range: bool) -> bytes | str:
    try:
        return codec.encode(value, check_range=check_range)
    except SpaceError as error:
        return str(error)


@given(spaces, st.data())
def test_values_round_trip(space: Space, data: st.DataObject) -> None:
    """decode(encode(v)) is v: its bytes are the same, they pass the check, and have one size."""
    codec = Codec(space)
    value = data.draw(values(space))
    encoded = codec.encode(value)
    assert codec.encode(codec.named(codec.decode(encoded))) == encoded
    assert codec.from_wire(encoded) == encoded == codec.from_wire(value)
    assert codec.itemsize in (None, len(encoded))
    codec.check(encoded)


@given(spaces, st.data())
def test_columns_round_trip(space: Space, data: st.DataObject) -> None:
    """Encodings behind each other <-> columns, for any number of values."""
    codec = Codec(space)
    rows = [codec.encode(v) for v in data.draw(st.lists(values(space), max_size=4))]
    columns = codec.columns(b"".join(rows), len(rows), [len(row) for row in rows])
    assert list(columns) == [leaf.path for leaf in codec.leaves] or codec._varied
    assert {len(column) for column in columns.values()} <= {len(rows)}
    assert codec.encode_columns(columns, len(rows)) == rows


@given(spaces, st.binary(max_size=80), st.data())
def test_damaged_bytes_are_a_space_error_or_a_value(
    space: Space, noise: bytes, data: st.DataObject
) -> None:
    """Random, cut or flipped bytes: SpaceError, or the canonical bytes of an allowed value."""
    codec = Codec(space)
    encoded = bytearray(codec.encode(data.draw(values(space))))
    if encoded:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(encoded[: data.draw(st.integers(0, len(encoded)))])
    for damaged in (noise, bytes(encoded), cut):
        try:
            codec.check(damaged)
        except SpaceError:
            continue
        assert codec.encode(codec.named(codec.decode(damaged))) == damaged
    try:
        codec.decode(noise)
    except SpaceError:
        return


odd_numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-3, 3), st.floats(), st.booleans(), st.none(),
    st.text(max_size=2), st.sampled_from([np.int8(1), np.uint64(2**63), np.float32(0.5),
    np.bool_(True), np.timedelta64(1, "s"), np.datetime64(0, "s"), 1e39, -0.0, 2**53 + 1, b"1"]),
)  # fmt: skip
odd_arrays = hnp.arrays(
    hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)
) | hnp.arrays(st.sampled_from([">f4", "f8", ">i8", "i8", "u1"]), 2, elements=st.integers(0, 3))
pairs = st.lists(st.floats(), min_size=2, max_size=2)
odd_values = odd_numbers | st.lists(odd_numbers, max_size=3) | odd_arrays | pairs
short_cut_spaces: list[Space] = [
    Box((2,)),
    Box((2,), np.dtype("float64")),
    Box((2,), low=np.float32(-1), high=np.float32(1)),  # type: ignore[arg-type]
    Box((2,), low=np.array([-1.0, -np.inf]), high=np.array([np.inf, 2.0])),
    Box(()),
    Box((2,), np.dtype("uint8")),
    Box((2,), np.dtype("int64"), np.array([0, -5]), np.array([3, 5])),
    Discrete(3, -1),
    Discrete(2**62, 2**62),
    MultiDiscrete((3, 4)),
    MultiBinary((2,)),
]


@given(st.sampled_from(short_cut_spaces), odd_values, st.booleans())
def test_short_cuts_change_nothing(space: Space, value: Any, check_range: bool) -> None:
    """Any value gives the bytes, or the error in the same words, of the general path."""
    with np.errstate(all="ignore"):
        assert outcome(Codec(space), value, check_range) == outcome(
            general(space), value, check_range
        )


@given(st.sampled_from(short_cut_spaces), st.binary(min_size=1, max_size=16), st.booleans())
def test_short_cuts_judge_bytes_alike(space: Space, data: bytes, check_range: bool) -> None:
    """Any bytes pass or fail the check with and without short cuts alike."""
    verdicts = []
    for codec in (Codec(space), general(space)):
        data = (data * 16)[: codec.itemsize]
        try:
            codec.check(data, check_range=check_range)
            verdicts.append("fine")
        except SpaceError as error:
            verdicts.append(str(error))
    assert verdicts[0] == verdicts[1]


def test_short_cuts_are_taken() -> None:
    """The values of hot paths do not fall through to the general path."""
    quick = Codec(Box((4,)))._slots[0].quick
    assert isinstance(quick, QuickNumbers)
    for value in (np.zeros(4, np.float32), np.zeros(4), [0.0] * 4, (0.5,) * 4):
        assert quick.encode(value, True) == Codec(Box((4,))).encode(value)
    choice = Codec(Discrete(2))._slots[0].quick
    assert isinstance(choice, QuickInteger)
    assert choice.encode(1, True) == choice.encode(np.int64(1), True) == b"\1" + bytes(7)


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (Box((1,)), 3, r"\$: expected .* got shape \(\): write \[3\.0\]"),
        (Box((2,)), [1.0], r"\$: expected finite float32 of shape \(2,\) .* got shape \(1,\)"),
        (Box((2,)), [1.0, float("nan")], "finite"),
        (Box((2,)), [1.0, 1e39], "finite"),
        (Box((2,)), ["a", "b"], "expected finite"),
        (Box((2,), np.dtype("uint8")), [1, 256], "uint8"),
        (Box((2,), np.dtype("uint8")), [1.0, 2.0], "got float64"),
        (Discrete(2), 2, r"an integer of 0\.\.1, got 2"),
        (Discrete(2), True, "an integer"),
        (Discrete(2), 1.0, "an integer"),
        (Text(3), "long", "0 to 3 characters"),
        (Text(3, 0, "ab"), "abc", "of 'ab'"),
        (Text(3), "\ud800", "surrogate"),
        (Dict((("a", Discrete(2)),)), {"b": 1}, r"keys \['a'\], got \['b'\]"),
        (Dict((("a", Tuple((Discrete(2), Text(1)))),)), {"a": (0, 5)}, r"\$\.a\[1\]"),
        (Tuple((Discrete(2),)), [1, 1], "expected 1 items"),
    ],
)
def test_a_refusal_says_what_and_where(space: Space, value: Any, message: str) -> None:
    """What was expected, what came, and the place inside the value."""
    with pytest.raises(SpaceError, match=message):
        Codec(space).encode(value)


def test_unclipped_actions_may_leave_the_bounds_and_stay_finite() -> None:
    """check_range=False: a Gaussian's sample passes, NaN and infinity do not."""
    codec = Codec(Box((2,), low=np.float32(-1), high=np.float32(1)))  # type: ignore[arg-type]
    with pytest.raises(SpaceError):
        codec.encode([0.0, 1.5])
    data = codec.encode([0.0, 1.5], check_range=False)
    codec.check(data, check_range=False)
    with pytest.raises(SpaceError):
        codec.check(data)
    with pytest.raises(SpaceError):
        codec.encode([0.0, float("inf")], check_range=False)


def test_the_first_invalid_of_many_is_named() -> None:
    """find_invalid gives the index and the reason, for numbers and for booleans."""
    codec = Codec(Dict((("a", Discrete(3)), ("b", Box((2,), np.dtype("bool"))))))
    good = codec.encode({"a": 1, "b": [True, False]})
    assert codec.find_invalid(good * 4, 4) is None
    wrong_choice = (9).to_bytes(8, "little") + good[8:]
    found = codec.find_invalid(good * 2 + wrong_choice + good, 4)
    assert found is not None
    assert found[0] == 2
    assert ".a: expected an integer of 0..2, got 9" in found[1]
    found = codec.find_invalid(good * 3 + good[:8] + b"\1\2", 4)
    assert found is not None
    assert (found[0], found[1][:2]) == (3, ".b")


def test_columns_of_the_wrong_kind_are_refused() -> None:
    """encode_columns never rounds a float to a choice, nor takes a column of another length."""
    codec = Codec(Dict((("a", Discrete(3)), ("t", Text(2)))))
    fine = {"a": np.array([0, 1]), "t": ["x", ""]}
    assert len(codec.encode_columns(fine, 2)) == 2
    wrong: list[dict[str, Any]] = [{"a": np.array(a)} for a in ([0.5, 1], [1])]
    wrong += [{"t": t} for t in (["x"], ["x", 5], ["abc", ""])]
    for change in wrong:
        with pytest.raises(SpaceError):
            codec.encode_columns({**fine, **change}, 2)
    with pytest.raises(SpaceError, match="t: expected 2 values"):
        codec.encode_columns({"a": fine["a"]}, 2)
    with pytest.raises(SpaceError, match="lengths"):
        codec.columns(b"".join(codec.encode_columns(fine, 2)), 2, [13, 13])


def test_the_wire_form_of_an_array() -> None:
    """{"dtype", "shape", "data"} stands for an array at a leaf, strictly."""
    codec = Codec(Box((2,)))
    data = np.array([1, 2], "<f4").tobytes()
    form = {"dtype": "float32", "shape": [2], "data": data}
    assert codec.from_wire(form) == codec.from_wire(data) == data
    wrong: list[dict[str, Any]] = [{"data": data[:4]}, {"data": "x"}, {"x": 1}]
    for change in (*wrong, {"dtype": "float64"}, {"shape": [1, 2]}):
        with pytest.raises(SpaceError):
            codec.from_wire({**form, **change})


ROWS = Codec(parse_space("candidates:64x20"))


def test_a_ragged_value_has_the_bytes_of_its_rows() -> None:
    """12 candidates of 20 features take 964 bytes, also if they come as the 64 that they may be."""
    rows = np.ones((12, 20), np.float32)
    rows[3] = 0
    data = ROWS.encode(rows)
    assert len(data) == 964
    assert data == ROWS.encode(rows.tolist())
    whole = ROWS.decode(data)
    assert whole.shape == (64, 20)
    assert (whole[:12] == rows).all()
    assert not whole[12:].any()
    assert ROWS.encode(whole) == data
    assert ROWS.encode([]) == bytes(4)
    ROWS.check(data)


@pytest.mark.parametrize(
    "value",
    [
        *(np.ones((65, 20)), np.ones((3, 19)), [[1.0] * 20, [1.0]], [1.0] * 20),
        *("x", 3.0, None, np.full((2, 20), np.nan), [["a"] * 20], [[None] * 20]),
    ],
    ids=range(10),
)
def test_rows_that_do_not_fit_are_refused(value: Any) -> None:
    with pytest.raises(SpaceError, match="expected up to 64 rows of 20 finite float32"):
        ROWS.encode(value)


def test_a_long_text_in_a_row_takes_no_memory_for_all_rows() -> None:
    codec = Codec(Box((2**19, 20), ragged=True))
    with pytest.raises(SpaceError, match="expected up to 524288 rows"):
        codec.encode([["x" * 100_000, *[""] * 19]])


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros(20),
        np.ones(19),
        np.ones(65 * 20),
        np.full(20, np.inf),
    ],
)
def test_bytes_of_rows_are_those_that_encode_makes(rows: Any) -> None:
    """Zeros at the end would give one value two encodings."""
    data = rows.astype("<f4").tobytes()
    with pytest.raises(SpaceError, match="expected up to 64 rows"):
        ROWS.check(len(data).to_bytes(4, "little") + data)
