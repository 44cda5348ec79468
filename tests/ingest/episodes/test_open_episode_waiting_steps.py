"""Steps that wait for late rewards: when their episode is cut, and when it is abandoned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingest.protocol import messages as wire
from storage.spaces.descriptors import parse_space
from tests.ingest.episodes.test_assembler import STEPS, Shell

NAME = "e"


def action(seq: int) -> wire.LogAction:
    return wire.LogAction(episode_id=NAME, seq=seq, obs=[float(seq), 0.0], action=0)


def windowed(window: float, steps: int) -> Shell:
    """An episode with an action each second, under `part_steps=8`, and its end."""
    policy = replace(STEPS, part_steps=8, reward_window=window, part_seconds=10_000.0)
    shell = Shell({"default": policy})
    shell.send(wire.Start(episode_id=NAME, start=0))
    for number in range(1, steps + 1):
        shell.now += 1.0
        shell.send(action(number))
    return shell


def test_a_long_window_does_not_make_a_part_of_every_step() -> None:
    """A cut leaves at most three times the steps that it takes, so copying is linear in the
    steps.
    """
    shell = windowed(100.0, 400)
    sizes = [part.steps for part in shell.parts(NAME)]
    assert len(sizes) < 10
    assert all(3 * size >= 100 - 1 for size in sizes)
    assert shell.assembler.episodes[NAME].steps <= 100 * 4 // 3 + 1


@pytest.mark.parametrize(("window", "expected"), [(0.0, 8), (2.0, 7), (6.0, 3)])
def test_a_cut_for_size_takes_all_closed_steps_of_what_is_too_long(
    window: float, expected: int
) -> None:
    """With a short window it comes as soon as an episode has one step more than a part may hold."""
    shell = windowed(window, 30)
    sizes = [part.steps for part in shell.parts(NAME)]
    assert sizes == [expected] * len(sizes)
    assert len(sizes) >= 3


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_cuts_can_ask_for_a_share_of_closed_steps(least: float) -> None:
    """This keeps a shortage of memory from making small parts every second."""
    shell = windowed(5.0, 7)
    cuts = list(shell.assembler.cuts(["default"], shell.now, least=least))
    assert len(cuts) == (least == 0.0)


def test_a_step_takes_rewards_until_it_can_be_cut() -> None:
    """At the end of its window a step is closed, for rewards and for cuts alike."""
    shell = windowed(5.0, 2)
    for now, answer, closed in ((5.75, "accepted", 0), (6.0, "window_closed", 1)):
        shell.now = now
        late = wire.LogReturns(episode_id=NAME, step=0, reward_id=str(now), reward=1.0)
        assert shell.send(late) == [answer]
        assert shell.assembler.episodes[NAME].closed(now) == closed


def test_a_step_that_was_decided_again_keeps_its_window() -> None:
    """The window counts from the step's first decision, whatever replaced that."""
    shell = Shell({"default": replace(STEPS, reward_window=5.0)})
    shell.send(wire.Start(episode_id=NAME, start=0))
    given = {"obs": [0.0, 0.0], "action_logp": -1.0, "policy_version": 1}
    for now, number in ((1.0, 0), (4.0, 1)):
        shell.now = now
        decided = wire.Decision(episode_id=NAME, seq=1, action=number, answered=now > 1, **given)
        assert shell.send(decided) == ["accepted"]
    shell.send(action(2))
    shell.now = 6.0
    late = wire.LogReturns(episode_id=NAME, step=0, reward_id="a", reward=1.0)
    assert shell.send(late) == ["window_closed"]


def test_rewards_for_named_steps_put_off_the_time_out() -> None:
    """An episode is abandoned once no event arrives for it; the same after a replay."""
    shell = windowed(10_000.0, 1)
    for number in range(4):
        shell.tick(shell.now + 400.0)
        late = wire.LogReturns(episode_id=NAME, step=0, reward_id=str(number), reward=1.0)
        assert shell.send(late) == ["accepted"]
        assert NAME in shell.assembler.episodes
    shell.tick(shell.now + 599.0)
    assert NAME in shell.assembler.episodes
    assert shell.send(late) == ["retry"]  # a repetition: nothing new
    shell.tick(shell.now + 1.0)
    assert NAME not in shell.assembler.episodes
    assert shell.send(action(2)) == ["abandoned"]


def test_tags_and_the_last_observation_are_memory_too() -> None:
    """An episode without a step, and one whose end waits for its windows, take memory."""
    policies = {"default": replace(STEPS, observation=parse_space("box:1000"), reward_window=9.0)}
    plain, tagged = Shell(policies), Shell(policies)
    plain.send(wire.Start(episode_id=NAME, start=0))
    tagged.send(wire.Start(episode_id=NAME, start=0, tags={"k": "v" * 200}))
    grown = tagged.assembler.open_bytes - plain.assembler.open_bytes
    assert grown == len('{"k":""}') + 200 - len("{}")
    obs = [0.5] * 1000
    plain.send(wire.LogAction(episode_id=NAME, obs=obs, action=0))
    before = plain.assembler.open_bytes
    plain.send(wire.End(episode_id=NAME, obs=obs))
    assert plain.assembler.open_bytes >= before + 4 * 1000
    plain.tick(10.0)
    assert plain.assembler.open_bytes == 0
