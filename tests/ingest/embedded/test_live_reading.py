"""Whole episodes of several policies, read in the process that collects them.

Also of `storage.reading.live_source`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import PolicyClient, PolicyServerInput
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.interfaces import ReaderState
from storage.spaces.descriptors import parse_space

SIZES = {"walker": 2, "scout": 2, "flyer": 3}  # walkers and scouts share their spaces


def declared(**rules: Any) -> list[PolicyDeclaration]:
    return [
        PolicyDeclaration(
            policy_id=name,
            observation=parse_space(f"box:{size}"),
            action=parse_space("discrete:2"),
            seal_seconds=0.2,
            **rules,
        )
        for name, size in SIZES.items()
    ]


def serve(root: Path | None, **given: Any) -> PolicyServerInput:
    given = {"policies": declared(), "multi_agent": True, "idle_timeout": 10.0, **given}
    return PolicyServerInput(None, "127.0.0.1", 0, root=root, **given)


def client_of(inputs: PolicyServerInput) -> PolicyClient:
    return PolicyClient(inputs.address, linger=0.0, policy_mapping_fn=lambda agent: agent[:-1])


def see(*agents: str) -> dict[str, list[float]]:
    return {agent: [0.5] * SIZES[agent[:-1]] for agent in agents}


def log_episode(client: PolicyClient, name: str) -> None:
    """Three steps of the environment, six of agents: scout1 leaves after one, flyer1 joins last."""
    client.start_episode(name)
    client.log_action(name, see("walker1", "scout1"), {"walker1": 0, "scout1": 1})
    client.log_returns(name, {"walker1": 1.0}, multiagent_done_dict={"scout1": True})
    client.log_action(name, see("walker1", "scout1"), {"walker1": 1})
    client.log_action(name, see("walker1", "flyer1"), {"walker1": 1, "flyer1": 0})
    client.end_episode(name, see("walker1"))
    client.flush()


def agents_of(batch: Any) -> list[tuple[str, str, int]]:
    return sorted(
        (row["eps_id"], row["agent_id"], int(row["env_t"]))
        for rows in batch.policy_batches.values()
        for row in rows.rows()
    )


def expected(name: str) -> list[tuple[str, str, int]]:
    walker = [(name, "walker1", t) for t in range(3)]
    return sorted([*walker, (name, "scout1", 0), (name, "flyer1", 2)])


@pytest.mark.parametrize("rooted", [True, False], ids=["root", "memory"])
def test_an_ended_episode_comes_out_whole(tmp_path: Path, rooted: bool) -> None:
    """next returns ended episodes with all their agents, as soon as they are durable."""
    with serve(tmp_path if rooted else None) as inputs, client_of(inputs) as client:
        for name in ("a", "b"):
            log_episode(client, name)
            batch = inputs.next()
            assert (batch.env_steps(), batch.agent_steps()) == (3, 5)
            assert agents_of(batch) == expected(name)
        assert inputs.next(0.0).env_steps() == 0
        assert inputs.stats.episodes == 2
        assert inputs.queued == 0  # rows that were read are freed


def test_what_the_queue_had_no_room_for_comes_from_shards_once(tmp_path: Path) -> None:
    """Whichever policy's parts overflow, every step of every agent is read once."""
    names = [f"e{i}" for i in range(6)]
    with serve(tmp_path, max_sample_queue_size=1) as inputs, client_of(inputs) as client:
        for name in names:
            log_episode(client, name)
        assert inputs.overflowed > 0
        found: list[Any] = []
        while len(found) < 5 * len(names):
            batch = inputs.next()
            assert batch.env_steps()
            found += agents_of(batch)
        assert sorted(found) == sorted(step for name in names for step in expected(name))
        assert inputs.next(0.5).env_steps() == 0


def test_a_position_goes_on_in_the_next_run(tmp_path: Path) -> None:
    """A restarted trainer reads the rest; a position that is ahead of the journal is refused,
    whichever policy's stream it is in."""
    with serve(tmp_path) as inputs, client_of(inputs) as client:
        log_episode(client, "first")
        assert agents_of(inputs.next()) == expected("first")
        log_episode(client, "second")
        state = json.loads(json.dumps(inputs.state_dict()))
    with serve(tmp_path, state=state) as inputs, client_of(inputs) as client:
        assert agents_of(inputs.next()) == expected("second")
        log_episode(client, "third")
        assert agents_of(inputs.next()) == expected("third")
    (ranges,) = state["policies"]["flyer"]["ledger"].values()
    ranges[-1][1] += 99
    with pytest.raises(ReaderState, match="the journal is older than the position"):
        serve(tmp_path, state=state)


def test_what_cannot_go_together_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    """The errors name the solution; for policies with different spaces that is multi_agent."""
    with pytest.raises(ValueError, match=r"pass policy_id= .* or multi_agent=True for episodes"):
        serve(None, multi_agent=False)
    held = declared(steps_per_version=64)
    with pytest.raises(ValueError, match=r"multi_agent: expected policies without steps_per_vers"):
        serve(None, policies=held)
    with pytest.raises(ValueError, match=r"multi_agent: .* got policy_id 'flyer'"):
        serve(None, policy_id="flyer")
    with pytest.raises(ValueError, match=r"multi_agent: .* got mode 'fragments'"):
        serve(None, mode="fragments")
