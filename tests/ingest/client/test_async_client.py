"""The client on an asyncio loop, against a real collector."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.client import async_client
from ingest.client.async_client import AsyncPolicyClient
from ingest.protocol.errors import CollectorUnavailable, Refusal
from ingest.protocol.messages import MSGPACK, ActionReply, ActionsReply, encode
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.scripted_collector import Answer, ScriptedCollector, Serve

ACTIONS = 1000  # so many that two draws are hardly ever equal
OBS = [0.0, 0.5, 1.0, -0.5]
OTHER = [1.0, 0.5, 1.0, -0.5]
AGENTS = {"left": "default", "right": "default"}


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    spec = PolicySpec(parse_space("box:4"), parse_space(f"discrete:{ACTIONS}"))
    store = WeightStore(tmp_path, "default")
    weights = Policy(spec, seed=1).get_weights()
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    with CollectorProcess(tmp_path) as running:
        yield running


def stored(collector: CollectorProcess, steps: int) -> dict[str, list[tuple[Any, ...]]]:
    """(source, action, reward) of each step of each episode."""
    collector.settle(steps)
    assert collector.stop() == 0
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in sorted(shard_rows(collector.root), key=lambda row: row["t"]):
        step = (row["source"], row["actions"], row["rewards"])
        found.setdefault(row["eps_id"], []).append(step)
    return found


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_a_thousand_episodes_at_once_from_one_loop(collector: CollectorProcess, mode: str) -> None:
    """1,000 episodes act on one loop at the same time. Each stored action is the one that its
    episode got, with its log-probability."""
    acted: dict[str, list[int]] = {}

    async def play(client: AsyncPolicyClient) -> None:
        name = client.start_episode()
        acted[name] = []
        for t in range(3):
            acted[name].append(await client.get_action(name, OBS))
            client.log_returns(name, float(t))
        client.end_episode(name, OBS)

    async def main() -> None:
        async with AsyncPolicyClient(collector.address, mode) as client:
            await client.connect()
            await asyncio.gather(*(play(client) for _ in range(1000)))
            await client.flush(60)
            assert client.stats.refused == {}
            assert client.stats.waiting == 0

    asyncio.run(main())
    rows = stored(collector, 3000)
    assert {name: [action for _, action, _ in steps] for name, steps in rows.items()} == acted
    assert {(source, reward) for steps in rows.values() for source, _, reward in steps} == {
        ("on_policy", 0.0),
        ("on_policy", 1.0),
        ("on_policy", 2.0),
    }
    assert all(row["action_logp"] < 0 for row in shard_rows(collector.root))


def test_a_local_action_lets_other_tasks_have_their_turn(collector: CollectorProcess) -> None:
    """A local get_action never has to wait, so it yields to the loop on purpose. Otherwise a
    handler that only acts would block all other tasks until it ends."""
    order: list[int] = []

    async def play(client: AsyncPolicyClient, number: int) -> None:
        name = client.start_episode()
        for _ in range(3):
            await client.get_action(name, OBS)
            order.append(number)

    async def main() -> None:
        async with AsyncPolicyClient(collector.address) as client:
            await client.connect()
            await client.update_policy_weights()
            await asyncio.gather(*(play(client, number) for number in range(3)))

    asyncio.run(main())
    assert order == [0, 1, 2] * 3


def test_a_cancelled_get_action_has_not_happened(collector: CollectorProcess) -> None:
    """After a cancelled get_action any call may follow: get_action on the same or another
    observation, log_action, log_returns for the step before, or end_episode. No event is refused,
    and the cancelled action is not stored."""

    async def cut(client: AsyncPolicyClient, name: str) -> None:
        """Cancel a get_action after its request was made and before the collector answers it."""
        os.kill(collector.serving_pid(), signal.SIGSTOP)
        task = asyncio.create_task(client.get_action(name, OBS))
        while not client._requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> dict[str, list[tuple[Any, ...]]]:
        expected: dict[str, list[tuple[Any, ...]]] = {}
        async with AsyncPolicyClient(collector.address, "remote") as client:
            names = {}
            for case in ("same", "other", "own", "reward", "end", "none"):
                name = names[case] = client.start_episode(case)
                action = await client.get_action(name, OTHER)
                client.log_returns(name, 1.0)
                expected[name] = [("on_policy", action, 1.0)]
                await cut(client, name)
                if case == "own":
                    client.log_action(name, OTHER, 7)
                    client.log_returns(name, 2.0)
                    expected[name].append(("logged", 7, 2.0))
                elif case == "reward":
                    client.log_returns(name, 4.0)
                    expected[name] = [("on_policy", action, 5.0)]
                elif case == "end":
                    client.end_episode(name, OTHER)
                os.kill(collector.serving_pid(), signal.SIGCONT)
                if case in ("same", "other"):
                    seen = OBS if case == "same" else OTHER
                    again = await client.get_action(name, seen)
                    client.log_returns(name, 3.0)
                    expected[name].append(("on_policy", again, 3.0))
                if case not in ("end", "none"):
                    client.end_episode(name)
            await client.flush(60)
            client.end_episode(names["none"])
            await client.flush(60)
            assert client.stats.refused == {}
        return expected

    expected = asyncio.run(main())
    assert stored(collector, sum(map(len, expected.values()))) == expected


def test_one_that_waits_for_its_turn_is_never_asked(collector: CollectorProcess) -> None:
    """A get_action that is cancelled before its request is made never reaches the collector; the
    calls made with it are answered."""

    async def main() -> None:
        async with AsyncPolicyClient(collector.address, "remote") as client:
            await client.connect()
            names = [client.start_episode() for _ in range(3)]
            tasks = [asyncio.create_task(client.get_action(name, OBS)) for name in names]
            await asyncio.sleep(0)
            tasks[1].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(found[1], asyncio.CancelledError)
            for name in names:
                client.end_episode(name)
            await client.flush(60)
            assert client.stats.acknowledged == 3 + 2 + 3

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_several_agents_act_together(collector: CollectorProcess, mode: str) -> None:
    """get_action takes mappings by agent and lists of episodes, as PolicyClient's does."""

    async def main() -> dict[str, Any]:
        async with AsyncPolicyClient(collector.address, mode) as client:
            whole = client.start_episode("whole", policy_id=AGENTS)
            found = await client.get_action(whole, dict.fromkeys(AGENTS, OBS))
            client.log_returns(whole, dict.fromkeys(AGENTS, 1.0), None, {"left": True})
            last = await client.get_action([whole], {whole: dict.fromkeys(AGENTS, OTHER)})
            assert last[whole].keys() == {"right"}
            client.end_episode(whole, {"right": OBS})
            both = [client.start_episode() for _ in range(2)]
            seen = await client.get_action(both, dict.fromkeys(both, OBS))
            assert set(seen) == set(both)
            await client.flush(60)
            assert client.stats.refused == {}
            return dict(found, right_last=last[whole]["right"])

    acted = asyncio.run(main())
    collector.settle(3)
    collector.stop()
    rows = [row for row in shard_rows(collector.root) if row["eps_id"] == "whole"]
    found = {(row["agent_id"], row["t"]): row["actions"] for row in rows}
    assert found == {
        ("left", 0): acted["left"],
        ("right", 0): acted["right"],
        ("right", 1): acted["right_last"],
    }


def test_what_cannot_be_answered_is_raised_and_leaves_the_episode(
    collector: CollectorProcess,
) -> None:
    """get_action raises for a bad observation, an unknown episode, and a collector that is away or
    too old. After that the episode can go on."""

    async def main() -> None:
        async with AsyncPolicyClient(collector.address, "remote") as client:
            name = client.start_episode()
            with pytest.raises(ValueError, match="shape"):
                await client.get_action(name, [1.0])
            with pytest.raises(Refusal, match="not found"):
                await client.get_action("nobody's", OBS)
            collector.kill()
            patient, client._timeout = client._timeout, 1.0
            with pytest.raises(CollectorUnavailable):
                await client.get_action(name, OBS)
            client._timeout = patient
            client.log_action(name, OBS, 1)
            collector.restart()
            await client.get_action(name, OBS)
            client.end_episode(name)
            await client.flush(60)
            assert client.stats.refused == {}
        with pytest.raises(TypeError, match="async with"), AsyncPolicyClient(collector.address):
            pass
        with pytest.raises(ValueError, match="sync"):
            AsyncPolicyClient(collector.address, sync=True)

    asyncio.run(main())
    collector.settle(2)


FORKING = r"""
import asyncio, os, sys
from headrace import AsyncPolicyClient
from tests.ingest.bare_fork import bare_fork

async def act(client):
    episode = client.start_episode()
    action = await asyncio.wait_for(client.get_action(episode, [0.0, 0.5, 1.0, -0.5]), 60)
    client.end_episode(episode)
    await client.flush(60)
    os.write(1, b"acted\n")  # one write, so that parent and child do not mix their lines

client = AsyncPolicyClient(sys.argv[1], sys.argv[2], timeout=60)
asyncio.run(act(client))
child = eval(sys.argv[3])()
asyncio.run(act(client))
if child == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("fork", ["os.fork", "bare_fork"])
@pytest.mark.parametrize("mode", ["local", "remote"])
def test_a_client_that_has_acted_acts_in_a_forked_child(
    collector: CollectorProcess, mode: str, fork: str
) -> None:
    """A process acts, forks, and then parent and child act, as after a warm-up with `gunicorn
    --preload`, or with uWSGI, which runs no fork hooks. The child has none of the parent's
    threads."""
    command = [sys.executable, "-c", FORKING, collector.address, mode, fork]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "acted\n" * 3), done.stderr


def test_a_collector_that_is_busy_until_the_deadline_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`get_action` raises the collector's own refusal, not that there was no answer."""
    now = 0.0
    monkeypatch.setattr(async_client, "monotonic", lambda: now)

    def busy(serve: Serve) -> Answer:
        nonlocal now
        now += 25.0
        error = Refusal("busy", "scripted busy", retry_after=0.001).to_json()
        reply = ActionsReply(durable=True, actions=[ActionReply(episode_id="", error=error)])
        return Answer(200, encode(reply, MSGPACK))

    async def main(collector: ScriptedCollector) -> None:
        async with AsyncPolicyClient(collector.address, "remote", timeout=60.0) as client:
            name = client.start_episode()
            await client.flush(60)
            collector.faults.extend([busy] * 3)
            with pytest.raises(Refusal, match="scripted busy") as caught:
                await client.get_action(name, [0.0, 0.0])
            assert caught.value.code == "busy"
            client.end_episode(name)

    with ScriptedCollector() as collector:
        asyncio.run(main(collector))
        assert len(collector.bodies("/v1/actions")) == 3


def test_a_call_without_an_answer_ends_however_many_wait() -> None:
    """The time that a call waits for a free thread counts towards its `timeout`, so that 240 calls
    without an answer do not wait for each other."""
    callers, timeout = 240, 2.0

    async def fail(client: AsyncPolicyClient) -> None:
        with pytest.raises(CollectorUnavailable, match="no answer"):
            await client.get_action(client.start_episode(), OBS)

    async def main() -> None:
        client = AsyncPolicyClient("http://127.0.0.1:9", "remote", timeout=timeout)
        everybody = asyncio.gather(*(fail(client) for _ in range(callers)))
        await asyncio.wait_for(everybody, callers / 8 * timeout)  # four at a time: twice that
        client._sender.retire()
        client._transport.close()

    asyncio.run(main())
