"""Runs of rows are episodes or tracks: the stored result of an import with several agents."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.bulk_import.runs import UNFIT, runs_of
from ingest.collector.collector import Collector
from ingest.protocol import messages as wire
from storage.experience.episode import Part
from storage.journal.memory_journal import MemoryJournal
from tests.ingest.bulk_import.test_handler import PATIENT, importing, rows_of, steps
from tests.ingest.bulk_import.test_step_columns import columns_of

NAMES = st.sampled_from(["a", "b", "c", "", None, "x" * 257])


@given(st.lists(st.tuples(NAMES, NAMES), max_size=12), st.booleans())
def test_runs_are_those_of_equal_rows(
    rows: list[tuple[str | None, str | None]], joint: bool
) -> None:
    """A run lasts while id and agent stay, and is valid if both are names and the pair is
    unique.
    """
    keys = [(name or "", (agent or "") if joint else None) for name, agent in rows]
    ids = pa.array([name for name, _ in rows], pa.string())
    agents = pa.array([agent for _, agent in rows], pa.string()) if joint else None
    found = runs_of(ids, agents, len(rows))
    begins = [at for at, key in enumerate(keys) if not at or key != keys[at - 1]]
    assert found.begins.tolist() == begins
    assert found.names == [keys[at][0] for at in begins]
    if joint and begins:
        assert found.agents == [keys[at][1] for at in begins]
    some = [keys[at] for at in begins]
    wrong = [
        not 0 < len(name) < 257
        or (agent is not None and not 0 < len(agent) < 257)
        or some.count((name, agent)) > 1
        for name, agent in some
    ]
    assert [bool(found.faults is not None and found.faults[at]) for at in range(len(some))] == wrong
    assert found.faults is None or set(found.faults) <= {0, *UNFIT}


# --- tracks ------------------------------------------------------------------------------------

TRACKS = [("e", "a", (0, 1, 2)), ("e", "b", (1,)), ("f", "agent0", (0, 2)), ("f", "a", (5, 6))]


def table_of(tracks: list[tuple[str, str, tuple[int, ...]]], **columns: Any) -> pa.Table:
    """Tracks of box:2 and discrete:3; every row has its episode's count of agents."""
    each = [(name, agent, t) for name, agent, times in tracks for t in times]
    agents = {name: sum(name == one for one, _, _ in tracks) for name, _, _ in tracks}
    given = {
        "eps_id": [name for name, _, _ in each],
        "agent_id": [agent for _, agent, _ in each],
        "env_t": pa.array([t for _, _, t in each], pa.int32()),
        "agents": [agents[name] for name, _, _ in each],
    }
    return steps({"": len(each)}, **given | columns)


def events_of(tracks: list[tuple[str, str, tuple[int, ...]]]) -> list[wire.Event]:
    """The same as the program's events: all start, then each agent's steps, then the ends."""
    row, events = 0, list[wire.Event]()
    for name, agent, _ in tracks:
        events.append(wire.Start(episode_id=name, agent_id=agent))
    for name, agent, times in tracks:
        for t in times:
            obs, action = [2.0 * row, 2.0 * row + 1], row % 3
            step = {"obs": obs, "action": action, "reward": float(row), "env_t": t}
            given = {"episode_id": name, "agent_id": agent, "replayed": True, **step}
            events.append(wire.LogAction(**given))
            row += 1
    agents = {name: sum(name == one for one, _, _ in tracks) for name, _, _ in tracks}
    for name, agent, _ in tracks:
        events.append(wire.End(episode_id=name, agent_id=agent, agents=agents[name]))
    return events


def parts_of(collector: Collector) -> list[Part]:
    """Parts that wait for a shard, without fields that depend on the time and order of arrival."""
    found = [
        one.part
        for ready in collector.sealing._ready.values()
        for item in ready.parts
        for one in item.split()
    ]
    plain = [
        msgspec.structs.replace(
            part, ordinal=0, episode_ordinal=0, action_logp=b"\0" * 8 * part.steps
        )
        for part in found
        if part is not None
    ]
    return sorted(plain, key=lambda part: (part.episode_id, part.agent_id, part.part))


@pytest.mark.parametrize("window", [0.0, 5.0])
def test_tracks_are_stored_as_their_events_would_be(window: float) -> None:
    """Agent, environment's step and number of agents, with a reward window or without."""
    policy = replace(PATIENT, reward_window=window, part_steps=2)

    async def main(how: str) -> list[Part]:
        now = 0.0
        given = {"clock": lambda: now, "wall": lambda: 77}
        async with importing(MemoryJournal(), policy, **given) as (collector, send):
            if how == "import":
                assert await send(table_of(TRACKS), "k") == (16, 0, [])
            else:
                reply, _ = collector.accept(wire.Batch(events=events_of(TRACKS)))
                assert reply.refused == []
            now = 10.0
            collector.tick()
            return parts_of(collector)

    imported, logged = asyncio.run(main("import")), asyncio.run(main("events"))
    if window:
        facts = [
            [(p.episode_id, p.agent_id, p.env_t, p.agents) for p in parts if p.ended]
            for parts in (imported, logged)
        ]
        assert len(facts[0]) == len(facts[1]) == 4
        assert [fact[::3] for fact in facts[0]] == [fact[::3] for fact in facts[1]]
        joined = [b"".join(p.env_t for p in parts) for parts in (imported, logged)]
        assert joined[0] == joined[1]
    else:
        assert imported == logged
    assert not any(math.isnan(x) for p in imported for x in np.frombuffer(p.action_logp))


def test_tracks_of_one_episode_may_come_in_several_imports() -> None:
    """The tracks of one episode may come in several imports with a key each. A repeated import adds
    nothing, also after a crash."""
    journal = MemoryJournal()
    first, second = TRACKS[:1], TRACKS[1:2]

    def table_of_two(tracks: list[Any]) -> pa.Table:
        return table_of(tracks, agents=[2] * sum(len(times) for *_, times in tracks))

    async def main() -> None:
        async with importing(journal) as (_, send):
            assert await send(table_of_two(first), "k:1") == (5, 0, [])
            crashed = journal.crash()
        async with importing(crashed) as (_, send):
            assert await send(table_of_two(first), "k:1") == (0, 5, [])
            assert await send(table_of_two(second), "k:2") == (3, 0, [])
            assert await send(table_of_two(second), "k:2") == (0, 3, [])
            late = table_of([("e", "c", (0,))], agents=[2])
            assert await send(late, "k:3") == (0, 0, [(0, "completed")])
            more = table_of([("g", "a", (0,))], agents=[3])
            other = table_of([("g", "b", (0,))], agents=[2])
            assert await send(more, "k:4") == (3, 0, [])
            assert await send(other, "k:5") == (0, 0, [(0, "invalid")])

    asyncio.run(main())


@pytest.mark.parametrize("stated", [2, None])
def test_tracks_stay_columns(stated: int | None) -> None:
    """They are one journal row. A repeated import knows them, also after a crash."""
    tracks = [(f"e{n}", agent, (0, 1)) for n in range(200) for agent in "ab"]
    table = table_of(tracks, agents=pa.array([stated] * 800, pa.int32()))

    async def main() -> MemoryJournal:
        async with importing(journal := MemoryJournal()) as (collector, send):
            assert await send(table, "k") == (1_600, 0, [])
            assert journal.last_row == 2  # the key's, and the tracks'
            assert {part.agents for part in parts_of(collector)} == {stated or -1}
            crashed = journal.crash()
        async with importing(crashed) as (_, send):
            assert await send(table, "k") == (0, 1_600, [])
            return crashed.crash()

    assert len(rows_of(asyncio.run(main()))) == 800


def test_a_client_takes_no_part_in_an_imports_episode() -> None:
    """Nor an import in a client's episode: two sources never make one episode."""

    async def main() -> None:
        async with importing(MemoryJournal()) as (collector, send):
            assert (await send(table_of([("e", "a", (0,))], agents=[2]), "k"))[0] == 3
            start = wire.Start(episode_id="e", agent_id="b")
            reply, _ = collector.accept(wire.Batch(events=[start]))
            assert [item.error["code"] for item in reply.refused] == ["conflict"]
            start = wire.Start(episode_id="f", agent_id="a")
            collector.accept(wire.Batch(events=[start]))
            mine = table_of([("f", "b", (0,))], agents=[2])
            assert (await send(mine, "l"))[2] == [(0, "conflict")]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"env_t": [0, 1, 1, 1, 0, 2, 5, 6]}, 2),
        ({"env_t": [-1, 1, 2, 1, 0, 2, 5, 6]}, 0),
        ({"env_t": [0, 1, 2, None, 0, 2, 5, 6]}, 3),
        ({"agent_id": ["a", "a", "a", None, "g", "g", "a", "a"]}, 3),
        ({"agent_id": ["a", "b", "a", "b", "g", "g", "a", "a"]}, 0),
    ],
)
def test_what_is_no_track_is_named(columns: dict[str, Any], row: int) -> None:
    """The environment's step must grow within a track, and a track's rows must be adjacent."""

    async def main() -> None:
        async with importing(MemoryJournal()) as (_, send):
            _, _, refused = await send(table_of(TRACKS, **columns))
            assert (row, "invalid") in refused

    asyncio.run(main())


def test_a_long_track_is_in_pieces_that_grow() -> None:
    """The first row of a later block is checked against the last row of the block before."""
    journal, times = MemoryJournal(), np.arange(3, 50_003)

    async def main() -> MemoryJournal:
        async with importing(journal) as (_, send):
            assert await send(table_of([("e", "a", tuple(times))]), "k") == (50_002, 0, [])
            return journal.crash()

    assert len(rows_of(asyncio.run(main()))) == 50_000
    blocks = list(columns_of(table_of([("e", "a", tuple(times))])).blocks())
    begin, end = blocks[1]
    times[begin] -= 1
    found = columns_of(table_of([("e", "a", tuple(times))])).block(begin, end)
    assert found.faults.rows.tolist() == [0]


def test_an_agent_without_the_environments_steps_is_no_track() -> None:
    """In shards, rows of a single agent have the agent `agent0` and no `env_t`."""

    async def main() -> None:
        async with importing(MemoryJournal()) as (_, send):
            lone = steps({"e": 2}, agent_id=["agent0"] * 2, env_t=pa.nulls(2))
            assert await send(lone) == (4, 0, [])
            named = steps({"f": 2}, agent_id=["walker"] * 2)
            assert await send(named) == (0, 0, [(-1, "invalid")])
            nobody = steps({"f": 2}, env_t=[0, 1])
            assert await send(nobody) == (0, 0, [(-1, "invalid")])

    asyncio.run(main())
