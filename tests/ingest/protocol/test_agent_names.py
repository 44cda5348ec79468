"""Tracks: the invariants of an episode of several agents, and its single calls over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.collector.recovery import recover
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.sealed_parts import Finished, Limits
from ingest.episodes.status import episode_state
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.errors import JournalFailed, JournalFull
from storage.experience.range_set import RangeSet
from storage.journal.memory_journal import MemoryJournal
from tests.collector_process import CollectorProcess, shard_rows
from tests.ingest.client.test_episode_calls_multi_agent import declare_two
from tests.ingest.episodes.test_assembler import (
    POLICIES,
    Shell,
    episodes,
    interleaved,
    picture,
    requests,
)
from tests.ingest.simulated_collector import Fault, Simulation


def start(agent: str | None, number: int, name: str = "e", policy: str = "default") -> wire.Start:
    return wire.Start(episode_id=name, start=number, policy_id=policy, agent_id=agent)


def act(agent: str | None, seq: int, env_t: int | None, name: str = "e") -> wire.LogAction:
    return wire.LogAction(
        episode_id=name, seq=seq, obs=[float(seq), 0.0], action=1, agent_id=agent, env_t=env_t
    )


def end(agent: str | None, seq: int, agents: int | None = None, name: str = "e") -> wire.End:
    return wire.End(episode_id=name, seq=seq, agent_id=agent, agents=agents)


# --- one id, one kind, one client -------------------------------------------------------------


@pytest.mark.parametrize("over", [False, True])
def test_one_id_is_an_episode_of_one_agent_or_of_several(over: bool) -> None:
    """The first start decides, open or ended; an agent may have the stored name of a lone one."""
    shell = Shell()
    taken = "completed" if over else "already_started"
    shell.send(start(None, 0, "one"), start("agent0", 1, "several"))
    if over:
        shell.send(end(None, 1, name="one"), end("agent0", 1, 1, name="several"))
    assert shell.send(start("agent0", 2, "one"), start("b", 3, "one")) == [taken] * 2
    assert shell.send(start(None, 4, "several")) == [taken]
    assert (
        shell.send(act("agent0", 1, 0, "one"), act(None, 1, None, "several")) == ["not_found"] * 2
    )
    with pytest.raises(Refusal, match=r"agent agent0 not found\. It has one agent: expected no"):
        shell.judge(act("agent0", 1, 0, "one"))
    with pytest.raises(Refusal, match="It has several agents: expected an agent_id") as caught:
        shell.judge(act(None, 1, None, "several"))
    assert (caught.value.episode_id, caught.value.agent_id) == ("several", None)


def test_names_are_pairs_and_never_joined_text() -> None:
    """No id and agent can be written so that they are taken for another pair."""
    shell = Shell()
    pairs = [("a", "b,c"), ("a,b", "c"), ("a, agent b", "c"), ("a", "b, agent c")]
    starts = [start(agent, i, name) for i, (name, agent) in enumerate(pairs)]
    assert shell.send(*starts) == ["accepted"] * 4
    assert shell.send(start(None, 4, "a, agent b,c")) == ["accepted"]


def test_the_tracks_of_an_episode_belong_to_one_client() -> None:
    """Another instance conflicts, as long as any of its agents is known."""
    shell = Shell()
    other = shell.register()
    shell.send(start("a", 0), act("a", 1, 0))
    assert shell.send(start("b", 0), instance=other) == ["conflict"]
    assert shell.send(start("a", 0), instance=other) == ["already_started"]
    assert shell.send(act("a", 2, 1), instance=other) == ["conflict"]
    shell.send(end("a", 2))  # it left early: others may still come
    assert shell.send(start("b", 0), instance=other) == ["conflict"]
    assert shell.send(start("b", 1)) == ["accepted"]


def test_nobody_joins_an_episode_that_is_whole() -> None:
    """An episode is whole once all agents that an end counted are known, and not before: starts may
    be late."""
    shell = Shell()
    shell.send(start("a", 0), act("a", 1, 0), end("a", 2, 2))
    assert shell.send(start("b", 1), act("b", 1, 0)) == ["accepted"] * 2
    assert shell.send(start("c", 2)) == ["completed"]
    assert shell.send(end("b", 2, 2), start("c", 2), start("a", 3)) == [
        "accepted",
        *["completed"] * 2,
    ]


@pytest.mark.parametrize("restarts", [False, True])
def test_ends_tell_one_number_of_agents_and_no_fewer_than_acted(restarts: bool) -> None:
    """Readers use this number to put an episode together."""
    shell = Shell()
    shell.send(start("a", 0), act("a", 1, 0), start("b", 1), act("b", 1, 0), start("idle", 2))
    if restarts:
        shell.restart()
    with pytest.raises(Refusal, match="expected at least 2, which have acted, got 1") as caught:
        shell.judge(end("a", 2, 1))
    assert (caught.value.code, caught.value.path) == ("invalid", "agents")
    assert shell.send(end("a", 2, 2)) == ["accepted"]
    if restarts:
        shell.restart()
    with pytest.raises(Refusal, match="expected 2, as an earlier end gave, got 5"):
        shell.judge(end("b", 2, 5))
    assert shell.send(act("idle", 1, 1), act("b", 2, 1)) == ["completed", "accepted"]
    assert shell.send(end("b", 3, 2), end("idle", 1)) == ["accepted"] * 2
    assert shell.send(start("c", 3)) == ["completed"]
    assert [shell.parts(("e", agent))[-1].agents for agent in "ab"] == [2, 2]


def test_who_acted_is_known_when_the_steps_are_in_shards() -> None:
    """After a cut and a restart, for an agent that goes on and one that has left."""
    shell = Shell()
    for number, agent in enumerate("ab"):
        shell.send(start(agent, number), act(agent, 1, 0), act(agent, 2, 1))
    shell.tick(61.0)
    shell.send(end("a", 3))
    whole = shell.assembler.wholes["e"]
    found = EpisodeAssembler(POLICIES)
    carries = [one.carry for one in shell.assembler.sealed if one.carry is not None]
    found.restore(RangeSet(), shell.assembler.finished.values(), carries[1:])
    assert found.wholes["e"].acted == whole.acted == {"a", "b"}


def test_env_t_grows_and_belongs_to_several_agents_only() -> None:
    """Each agent has its own; a lone agent has none, and no count of agents."""
    shell = Shell()
    shell.send(start("a", 0), start("b", 1), start(None, 2, "one"))
    assert shell.send(act("a", 1, 5), act("b", 1, 5), act("a", 2, 7)) == ["accepted"] * 3
    assert shell.send(act("a", 3, 7), act("a", 3, 6), act("a", 3, None)) == ["invalid"] * 3
    assert shell.send(act("a", 2, 7), act("a", 2, 8)) == ["retry", "conflict"]
    assert shell.send(act(None, 1, 0, "one"), end(None, 1, 1, "one")) == ["invalid"] * 2


# --- together in time and trouble -------------------------------------------------------------


def test_an_episode_is_abandoned_when_nothing_comes_of_any_agent() -> None:
    """Not while one acts; then all of them are abandoned, and no agent can join."""
    shell = Shell()
    shell.send(start("a", 0), act("a", 1, 0), start("b", 1, policy="default"))
    for i in range(1, 5):
        shell.tick(i * 500.0)
        assert shell.send(act("b", i, i)) == ["accepted"]
    shell.tick(2599.0)
    assert ("e", "a") in shell.assembler.episodes
    shell.tick(2600.0)
    assert shell.assembler.episodes == {}
    assert [shell.parts(("e", agent))[-1].ended for agent in "ab"] == ["abandoned"] * 2
    assert shell.send(start("c", 2), act("a", 2, 9)) == ["abandoned"] * 2
    state = episode_state(shell.assembler, "e")
    assert state is not None
    assert state.state == "abandoned"


def test_an_episode_is_broken_with_one_of_its_tracks() -> None:
    """The cause names the agent whose event it was."""
    shell = Shell()
    shell.send(start("a", 0), act("a", 1, 0), start("b", 1), act("b", 1, 0))
    shell._commit(shell.assembler.break_episode(("e", "b"), "a bad obs"))
    assert [shell.parts(("e", agent))[-1].ended for agent in "ab"] == ["broken"] * 2
    assert shell.send(start("c", 2), act("a", 2, 1)) == ["broken"] * 2
    state = episode_state(shell.assembler, "e")
    assert state is not None
    assert (state.state, state.cause) == ("broken", "agent b: a bad obs")


def test_episodes_of_several_agents_are_forgotten_with_their_tracks() -> None:
    """Memory is bounded by a count of tracks."""
    shell = Shell(limits=Limits(finished=3))
    for i in range(6):
        shell.send(start("a", 2 * i, f"e{i}"), end("a", 1, 1, f"e{i}"))
    assert list(shell.assembler.wholes) == ["e3", "e4", "e5"]


# --- the journal ------------------------------------------------------------------------------


def _as_before(blob: bytes) -> bytes:
    """A row as it was written before tracks existed: without their fields."""
    received, steps, events, running = msgspec.msgpack.decode(blob)
    new = {1, 2, 4}  # the tags of Started, Acted and Ended
    old = [event[:-1] if event[0] in new else event for event in events]
    return msgspec.msgpack.encode([received, steps, old, running])


@settings(max_examples=30)
@given(st.data())
def test_a_journal_from_before_tracks_is_the_same_history(data: st.DataObject) -> None:
    """Rows of episodes of one agent without the fields that tracks brought."""
    shell = Shell()
    scripts = [s for s in data.draw(episodes) if s[0].agent_id is None]
    for batch in data.draw(interleaved(scripts).flatmap(requests)):
        shell.send(*batch)
    journal = MemoryJournal()
    rows = [(number, _as_before(blob)) for number, blob in shell.journal.replay()]
    journal.commit(rows)
    found = recover(journal, shell.policies)
    found.assembler.sealed = found.waiting
    assert picture(found.assembler) == picture(shell.assembler)


def test_an_end_from_before_tracks_is_remembered() -> None:
    """The journal's state holds ends without an agent."""
    old = ["e", 1, "i", 0, 5, "terminated", ""]
    found = msgspec.msgpack.decode(msgspec.msgpack.encode([old]), type=list[Finished])
    assert found == [Finished("e", 1, "i", 0, 5, "terminated")]
    assert found[0].name == "e"
    assert (found[0].policy_id, found[0].schema_id) == ("", "")  # nor its rules


KINDS = [(JournalFailed, False), (JournalFailed, True), (JournalFull, False)]


@pytest.mark.parametrize(("kind", "after"), KINDS)
@pytest.mark.parametrize("at", range(2, 10))
def test_every_tracks_events_count_once_whenever_a_commit_fails(
    kind: type[Exception], after: bool, at: int
) -> None:
    """A client sends each batch until it is acknowledged, over crashes and full disks."""
    batches: list[list[wire.Event]] = [
        [start("agent0", 0), act("agent0", 1, 0)],
        [start("b", 1), act("b", 1, 1), act("agent0", 2, 1)],
        [act("b", 2, 2), end("b", 3)],
        [act("agent0", 3, 3), end("agent0", 4, 2)],
    ]

    async def run() -> list[Any]:
        simulation = Simulation(POLICIES, fault=Fault(at, kind, after))
        await simulation.begin()
        instance = await simulation.register()
        for batch in batches:
            reply = await simulation.send(instance, batch)
            assert not reply.refused
            await simulation.advance(10.0)
        await simulation.finish()
        return simulation.writer.parts

    found = asyncio.run(run())
    steps = {
        agent: [
            (t, seq)
            for part in sorted(found, key=lambda part: part.t0)
            if part.agent_id == agent
            for t, seq in zip(
                np.frombuffer(part.env_t, np.int64),
                np.frombuffer(part.obs, np.float32)[::2],
                strict=True,
            )
        ]
        for agent in ("agent0", "b")
    }
    assert steps == {"agent0": [(0, 1.0), (1, 2.0), (3, 3.0)], "b": [(1, 1.0), (2, 2.0)]}
    assert {part.agent_id: part.agents for part in found if part.ended} == {"agent0": 2, "b": -1}


# --- single calls -----------------------------------------------------------------------------


def test_single_calls_name_the_agent_in_the_body(tmp_path: Path) -> None:
    """curl can start, log, ask for and end each agent's track."""
    declare_two(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        post, one = collector.post, "/v1/episodes/e"
        status, reply = post(
            "/v1/episodes", {"episode_id": "e", "policy_id": "walker", "agent_id": "left"}
        )
        assert (status, reply) == (201, {"episode_id": "e", "agent_id": "left"})
        post("/v1/episodes", {"episode_id": "e", "policy_id": "flyer", "agent_id": "right"})
        left, right = {"agent_id": "left"}, {"agent_id": "right"}
        step = {"obs": [0.5, 0.5], "action": 2, "env_t": 0}
        assert post(f"{one}/log_action", {**step, **left})[0] == 200
        status, reply = post(f"{one}/log_action", {**step, **right})
        assert status == 422
        assert reply["error"]["agent_id"] == "right"
        assert reply["error"]["message"].startswith("Episode e, agent right: expected")
        status, reply = post(f"{one}/log_action", {**step, **left, "env_t": None})
        assert (status, reply["error"]["path"]) == (422, "$.env_t")
        assert post(f"{one}/log_returns", {"reward": 1.5, **left})[0] == 200
        status, reply = post(f"{one}/action", {"obs": [0.0] * 4, "env_t": 1, **right})
        assert (status, reply["error"]["code"]) == (503, "no_version")
        status, reply = post(f"{one}/log_returns", {"reward": 1.5})
        assert (status, reply["error"]["code"]) == (404, "not_found")
        status, state = collector.get(one)
        assert (status, state) == (
            200,
            {
                "episode_id": "e",
                "state": "open",
                "agents": {
                    "left": {"state": "open", "next_seq": 3, "steps": 1, "policy_id": "walker"},
                    "right": {"state": "open", "next_seq": 1, "steps": 0, "policy_id": "flyer"},
                },
            },
        )
        assert post(f"{one}/end", {**right})[0] == 200
        assert post(f"{one}/end", {**left, "agents": 1, "obs": [1, 1]})[0] == 200
        status, state = collector.get(one)
        assert (state["state"], state["agents"]["left"]["state"]) == ("terminated", "terminated")
        assert post(f"{one}/log_action", {**step, **left})[0] == 409
        assert post("/v1/episodes", {"episode_id": "e", "agent_id": "third"})[0] in (409, 422)
        assert collector.stop() == 0
    (row,) = shard_rows(tmp_path)
    assert (row["agent_id"], row["env_t"], row["agents"], row["rewards"]) == ("left", 0, 1, 1.5)
