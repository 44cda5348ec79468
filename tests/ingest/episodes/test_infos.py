"""A step's info in several pieces: the result, its cost and its limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.episodes.infos import MAX_MERGED, MergedInfo
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import PolicyDeclaration
from tests.ingest.delivery.test_unconfirmed import decision, started
from tests.ingest.episodes.test_assembler import STEPS, Shell

NAME = "e"
keys = st.one_of(st.sampled_from(["a", "b", 'q"', "é\n", ""]), st.text(max_size=4))
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
infos = st.dictionaries(keys, values, max_size=5)


def text_of(info: dict[str, Any]) -> str:
    """The text of an info in journal events."""
    return json.dumps(info, ensure_ascii=False)


@given(st.lists(infos, min_size=1, max_size=4), infos)
def test_pieces_are_one_object_where_the_later_value_wins(
    pieces: list[dict[str, Any]], earlier: dict[str, Any]
) -> None:
    """The text is that of the merged objects, in order, and its size is known in advance."""
    merged, expected = MergedInfo.of(text_of(pieces[0])), dict(pieces[0])
    for piece in pieces[1:]:
        merged.add(text_of(piece))
        expected.update(piece)
        assert str(merged) == text_of(expected)
        assert len(merged) == len(str(merged))
    merged.add(text_of(earlier), first=True)
    assert json.loads(str(merged)) == {**earlier, **expected}
    assert (len(merged), merged.keys) == (len(str(merged)), len({**earlier, **expected}))


def acting(**rules: Any) -> Shell:
    """An episode with one open step."""
    policy = PolicyDeclaration(observation=STEPS.observation, action=STEPS.action, **rules)
    shell = Shell({"default": policy})
    shell.send(wire.Start(episode_id=NAME, start=0), action(1))
    return shell


def action(seq: int | None = None, info: dict[str, Any] | None = None) -> wire.LogAction:
    return wire.LogAction(episode_id=NAME, seq=seq, obs=[0.0, 0.0], action=0, info=info)


def returns(
    info: dict[str, Any], seq: int | None = None, step: int | None = None
) -> wire.LogReturns:
    return wire.LogReturns(episode_id=NAME, seq=seq, reward=0.0, info=info, step=step)


def test_a_small_piece_is_small_work_however_much_is_known() -> None:
    """A step's earlier infos are never read or written again: the very same strings stay."""
    shell = acting()
    shell.send(returns({f"k{i}": [i] for i in range(1_000)}), returns({"x": 0}))
    info = shell.assembler.episodes[NAME].infos[0]
    assert isinstance(info, MergedInfo)
    known = list(info.values.values())[:1_000]
    for i in range(20):
        shell.send(returns({"x": i}))
    assert shell.assembler.episodes[NAME].infos[0] is info
    assert all(a is b for a, b in zip(known, info.values.values(), strict=False))
    shell.send(wire.End(episode_id=NAME))
    (part,) = shell.parts(NAME)
    assert json.loads(part.infos[0]) == {**{f"k{i}": [i] for i in range(1_000)}, "x": 19}


def test_another_decision_costs_what_it_says_however_much_is_known() -> None:
    """The step's infos stay unchanged; the decision adds only keys that they lack."""
    shell = started()
    shell.send(decision(1, 0))
    for info in ({"page": 3, "k": 1}, {"k": 2}):
        late = wire.LogReturns(episode_id=NAME, step=0, reward_id=str(info), reward=0.0, info=info)
        assert shell.send(late) == ["accepted"]
    known = shell.assembler.episodes[NAME].infos[0]
    for number in range(4):
        other = decision(1, number % 2, answered=True)
        other.info = {"page": 0, "n": number}
        assert shell.send(other) == ["accepted"]
        assert shell.assembler.episodes[NAME].infos[0] is known
    assert str(known) == '{"page": 3, "k": 2, "n": 0}'


def test_the_bytes_of_infos_are_counted_through_merges_and_cuts() -> None:
    """A part's size is that of its merged infos as text; keys are counted separately."""
    shell = acting(reward_window=10.0)
    episode = shell.assembler.episodes[NAME]
    for at in range(4):
        shell.send(
            returns({"a": at}, step=at), returns({"b": 1, "a": 9}, step=at), action(info={"c": 1})
        )
        shell.send(returns({"c": 22}, step=at + 1))
        shell.now += 6.0
        shell.tick(shell.now)
        assert episode.info_bytes == sum(len(str(info)) for info in episode.infos.values())
        merged = [info for info in episode.infos.values() if isinstance(info, MergedInfo)]
        assert merged
        assert episode.info_keys == sum(info.keys for info in merged)
    shell.tick(shell.now + 61.0)
    assert [part.t0 for part in shell.parts(NAME)] == [0]
    assert episode.info_bytes == sum(len(str(info)) for info in episode.infos.values())
    assert episode.info_keys < 4 * 2


@pytest.mark.parametrize("step", [None, 0])
def test_the_infos_of_a_step_have_an_end(step: int | None) -> None:
    """422 names the limit; the episode is unchanged, and a single info has the message's limit."""
    shell = acting()
    long = "x" * (MAX_MERGED - 20)
    assert shell.send(returns({"long": long + long}, seq=2)) == ["accepted"]
    shell.send(action(3), returns({"long": long}, step=None if step is None else 1))
    late = returns({"more": "y" * 20}, step=None if step is None else 1)
    with pytest.raises(Refusal, match=f"expected at most {MAX_MERGED} characters") as caught:
        shell.judge(late)
    assert (caught.value.code, caught.value.path) == ("invalid", "info")
    assert shell.send(returns({}, step=None if step is None else 1)) == ["accepted"]
    assert shell.send(returns({"long": long + long}, seq=2)) == ["retry"]
