"""Remote actions whose reply precedes the commit: the stored action is the one that was used.

A short form of the fault suite's scenario `decisions`, with the broken builds that it must detect,
and the assembler's part.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.client.policy_client import PolicyClient
from ingest.collector.recovery import recover
from ingest.delivery.unconfirmed import Kept, seq_of
from ingest.protocol import messages as wire
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults import decisions, mutants, slow_disk
from tests.faults.decisions import ACTIONS, publish
from tests.faults.scenario import Trial
from tests.ingest.episodes.test_assembler import Shell, picture


@pytest.fixture
def very_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill precedes commits on a busy machine, too."""
    monkeypatch.setenv(slow_disk.SECONDS, "0.15")


@pytest.mark.usefixtures("very_slow_disk")
def test_kills_between_a_reply_and_the_next_event_change_nothing(tmp_path: Path) -> None:
    """Every step is stored once, with the action that the client received."""
    verdict = decisions.run(Trial(seed=3, folder=tmp_path, size=8))
    assert verdict.faults == {}
    assert verdict.counts["decisions_lost_by_kills"] > 0


@pytest.mark.long
@pytest.mark.usefixtures("very_slow_disk")
@pytest.mark.parametrize("name", ["decisions-ignored", "nothing-kept"])
def test_builds_that_break_the_protocol_are_found_out(tmp_path: Path, name: str) -> None:
    """The check finds two planted builds: one compares no decisions, the other takes any reply for
    an acknowledgement."""
    broken = mutants.find(name)
    verdict = decisions.run(Trial(seed=3, folder=tmp_path, size=8, mutant=broken))
    assert broken.symptoms["decisions"] in verdict.faults


def test_flush_waits_until_the_decisions_are_durable(tmp_path: Path) -> None:
    """A kill after flush loses nothing, although no event followed the last decision."""
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    publish(tmp_path)
    with (
        CollectorProcess(tmp_path, plant=slow_disk.__name__) as collector,
        PolicyClient(collector.address, "remote") as client,
    ):
        name = client.start_episode()
        client.get_action(name, [0.0] * 4)
        assert client.stats.waiting in (1, 2)  # the decision, and perhaps the start
        client.flush(60)
        assert client.stats.waiting == 0
        assert client.stats.acknowledged == 2
        collector.kill()
        collector.restart()
        assert collector.get(f"/v1/episodes/{name}")[1]["next_seq"] == 2
        client.end_episode(name)


@pytest.mark.usefixtures("very_slow_disk")
def test_a_late_reward_that_travelled_with_a_request_is_not_lost(tmp_path: Path) -> None:
    """A late reward has no number, so a reply about earlier numbers does not confirm it."""
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    publish(tmp_path)
    with (
        CollectorProcess(tmp_path, plant=slow_disk.__name__) as collector,
        PolicyClient(collector.address, "remote") as client,
    ):
        name = client.start_episode()
        client.get_action(name, [0.0] * 4)
        client.flush(60)
        for step in (0, 1):
            client.log_returns(name, 1.0, step=step, reward_id=f"of step {step}")
            client.get_action(name, [0.0] * 4)  # the reply precedes the commit
        collector.kill()
        collector.restart()
        client.end_episode(name)
        client.flush(60)
        assert client.stats.waiting == 0
        collector.settle(3)
        assert collector.stop() == 0
    rewards = [row["rewards"] for row in shard_rows(tmp_path)]
    assert rewards == [1.0, 1.0, 0.0]


# --- the assembler's side ---------------------------------------------------------------------


def decision(seq: int, action: int, **given: object) -> wire.Decision:
    values = {"obs": [0.5, 0.5], "action_logp": -1.0, "policy_version": 4, **given}
    return wire.Decision(episode_id="e", seq=seq, action=action, **values)  # type: ignore[arg-type]


def reward(seq: int, decided: bytes | None) -> wire.LogReturns:
    return wire.LogReturns(episode_id="e", seq=seq, reward=1.0, decided=decided)


def started() -> Shell:
    shell = Shell()
    shell.send(wire.Start(episode_id="e", start=0, policy_id="default"))
    return shell


def name_of(shell: Shell) -> bytes:
    return shell.assembler.episodes["e"].decision()


def test_an_event_that_follows_another_decision_is_refused() -> None:
    """A collector that made another decision learns of the difference at the next event, which has
    no effect.
    """
    shell = started()
    shell.send(decision(1, 1))
    acted_on = name_of(shell)
    other = started()
    other.send(decision(1, 2))
    assert other.send(reward(2, acted_on)) == ["decision_unknown"]
    assert other.assembler.episodes["e"].next_seq == 2
    assert shell.send(reward(2, acted_on)) == ["accepted"]


def test_the_decision_that_was_acted_on_takes_the_others_place() -> None:
    """The decision that was acted on replaces that of the open step, once; sent again, it is a
    retry."""
    shell = started()
    shell.send(decision(1, 2), decision(2, 2, obs=[0.1, 0.2]))
    assert shell.send(decision(2, 0)) == ["conflict"]
    assert shell.send(decision(2, 0, answered=True)) == ["accepted"]
    assert shell.send(decision(2, 0, answered=True)) == ["retry"]
    assert shell.send(decision(1, 0, answered=True)) == ["conflict"]
    shell.send(reward(3, name_of(shell)))
    assert shell.send(decision(2, 1, answered=True)) == ["conflict"]
    assert shell.send(wire.End(episode_id="e", seq=4)) == ["accepted"]
    assert list(bytes(shell.assembler.sealed[-1].part.actions)[::8]) == [2, 0]


def test_the_same_decision_has_the_same_name_everywhere() -> None:
    """The name contains neither the episode's number in the journal nor a time."""
    first, second = started(), Shell()
    second.send(wire.Start(episode_id="other", start=0, policy_id="default"))
    second.send(wire.Start(episode_id="e", start=1, policy_id="default"))
    first.send(decision(1, 1, ts=1))
    second.send(decision(1, 1, ts=2))
    assert name_of(first) == name_of(second) != b""


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=12))
def test_a_replay_knows_the_decisions_that_won(
    steps: list[tuple[int, bool, bool]],
) -> None:
    """Replaying the journal gives the same state, whichever steps were decided twice."""
    shell, seq, acted = started(), 1, []
    for action, twice, cut in steps:
        first = (action + 1) % 3 if twice else action
        shell.send(decision(seq, first))
        if twice:
            assert shell.send(decision(seq, action, answered=True)) == ["accepted"]
        acted.append(action)
        seq += 1
        if cut:
            shell.tick(shell.now + 61.0)
    found = recover(shell.journal.crash(), shell.policies)
    found.assembler.sealed = found.waiting
    assert picture(found.assembler) == picture(shell.assembler)
    shell.send(wire.End(episode_id="e", seq=seq))
    stored = b"".join(part.actions for part in shell.parts("e"))
    assert list(stored[::8]) == acted


def test_all_that_may_be_lost_is_sent_again() -> None:
    """A collector that lost event 2 may unknowingly hold another decision as event 1."""
    kept = Kept()
    kept.keep("e", [decision(1, 0, answered=True), decision(2, 1, answered=True)])
    assert kept.take("e", 4) == []
    assert [seq_of(event) for event in kept.take("e", 2)] == [1, 2]
    assert not kept


def test_a_reward_that_named_the_step_stays_with_the_decision_that_won() -> None:
    """The reward was acknowledged before the decision was replaced, and sent again it is a
    retry."""
    shell = started()
    shell.send(decision(1, 2))
    click = wire.LogReturns(episode_id="e", step=0, reward_id="click", reward=5.0, info={"page": 3})
    assert shell.send(click) == ["accepted"]
    assert shell.send(decision(1, 0, answered=True)) == ["accepted"]
    assert shell.send(click) == ["retry"]
    shell.send(wire.End(episode_id="e", seq=2))
    (part,) = shell.parts("e")
    assert (part.rewards, part.infos) == (struct.pack("<d", 5.0), {0: '{"page": 3}'})


def test_a_number_is_kept_once() -> None:
    """The client acted on the last answer."""
    kept = Kept()
    kept.keep("e", [decision(1, 0, answered=True)])
    kept.keep("e", [decision(1, 1, answered=True)])
    assert [event.action for event in kept.take("e", 1)] == [1]  # type: ignore[union-attr]


LATE = ("a", "b")


@given(st.lists(st.tuples(st.booleans(), st.integers(-2, 6)), max_size=30))
def test_what_is_kept_is_what_a_plain_list_would_hold(turns: list[tuple[bool, int]]) -> None:
    """Numbers come in any order, some rewards have none, and any number of events becomes durable.

    A reward without a number (below 0 here) is sent with a numbered event, or under its own name.
    """
    kept, plain = Kept(), list[wire.Event]()

    def event_of(seq: int) -> wire.Event:
        if seq >= 0:
            return decision(seq, 0)
        return wire.LogReturns(episode_id="e", step=0, reward_id=LATE[seq], reward=1.0)

    def is_one(one: wire.Event, other: wire.Event) -> bool:
        return (seq_of(one), getattr(one, "reward_id", None)) == (
            seq_of(other),
            getattr(other, "reward_id", None),
        )

    for is_new, seq in turns:
        event = event_of(seq)
        if is_new:
            kept.keep("e", [event])
            plain = [other for other in plain if not is_one(other, event)] + [event]
        elif seq < 0:
            gone = [other for other in plain if is_one(other, event)]
            assert kept.delivered(event) == gone
            plain = [other for other in plain if other not in gone]
        else:
            last = max((i for i, one in enumerate(plain) if 0 <= seq_of(one) <= seq), default=-1)
            gone = [
                one
                for i, one in enumerate(plain)
                if 0 <= seq_of(one) <= seq or (seq_of(one) < 0 and i < last)
            ]
            assert kept.durable("e", seq) == gone
            plain = [one for one in plain if one not in gone]
        assert (len(kept), bool(kept)) == (len(plain), bool(plain))
    assert [seq_of(event) for event in kept.copies()] == list(map(seq_of, plain))
