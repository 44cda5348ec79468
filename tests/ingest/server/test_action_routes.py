"""Remote actions: an error in one caller's request is answered to that caller alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.access.key_files import create_token
from ingest.client.policy_client import PolicyClient
from ingest.collector.live_policies import Choice, LivePolicies
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.server.action_routes import Acting
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import JournalFull
from storage.journal.memory_journal import MemoryJournal
from storage.spaces.descriptors import parse_space
from storage.weights import store as storage_store
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.collector.test_collector import GatedJournal, registered, run, running

SPEC = PolicySpec(
    parse_space("box:2"), parse_space("discrete:2"), ModuleSpec(hidden=(), value_head=False)
)
WEIGHTS = {  # of normal size, and beyond float32 on LARGE
    "pi.0.weight": np.array([[2, 2], [-2, -2]], np.float32),
    "pi.0.bias": np.zeros(2, np.float32),
}
LARGE = [3e38, 3e38]


def publish(store: storage_store.WeightFolder) -> None:
    store.publish(store.add_candidate(WEIGHTS, spec=SPEC.to_json(), metrics={}, lineage={}))


def ask(name: str, obs: Sequence[float] = (0.0, 0.0)) -> dict[str, Any]:
    return {"type": "get_action", "episode_id": name, "obs": list(obs)}


def outcome(answer: dict[str, Any]) -> Any:
    return answer["error"]["code"] if "error" in answer else "acted"


# --- over HTTP ----------------------------------------------------------------------------------


def test_an_episode_that_outlived_its_declaration_is_refused_alone(tmp_path: Path) -> None:
    """An open episode whose policy's file is gone, or has other spaces, gets 503, and can be logged
    and ended.

    Other episodes in its request and in its turn are not affected.
    """
    declare(tmp_path, observation="box:3")
    other = PolicyDeclaration(
        policy_id="b", observation=parse_space("box:2"), action=parse_space("discrete:2")
    )
    save_declaration(tmp_path, other)
    with CollectorProcess(tmp_path) as collector:
        for name, policy, obs in (("old", "default", [0, 0, 0]), ("gone", "b", [0, 0])):
            collector.post("/v1/episodes", {"episode_id": name, "policy_id": policy})
            collector.post(f"/v1/episodes/{name}/log_action", {"obs": obs, "action": 1})
        assert collector.stop() == 0
        for path in (tmp_path / "policies").glob("*.json"):
            path.unlink()
        declare(tmp_path, observation="box:2")
        publish(WeightStore(tmp_path, "default"))
        collector.restart()
        collector.post("/v1/episodes", {"episode_id": "new"})
        actions = [ask("new"), ask("old", [0, 0, 0]), ask("gone")]
        status, reply = collector.post("/v1/actions", {"actions": actions})
        assert status == 200
        assert list(map(outcome, reply["actions"])) == ["acted", "no_version", "no_version"]
        for name, obs in (("old", [0, 0, 0]), ("gone", [0, 0])):
            status, answer = collector.post(f"/v1/episodes/{name}/action", {"obs": obs})
            assert (status, answer["error"]["episode_id"]) == (503, name), answer
            assert "spaces that this episode began with" in answer["error"]["message"]
            body = {"obs": obs, "action": 0}
            assert collector.post(f"/v1/episodes/{name}/log_action", body)[0] == 200
            assert collector.post(f"/v1/episodes/{name}/end")[0] == 200


def test_a_legal_observation_that_overflows_is_refused_alone(tmp_path: Path) -> None:
    """422 names the field and the version; the episode is unchanged; log_action accepts it."""
    declare(tmp_path, observation="box:2")
    publish(WeightStore(tmp_path, "default"))
    with CollectorProcess(tmp_path) as collector:
        for name in ("a", "b", "c"):
            collector.post("/v1/episodes", {"episode_id": name})
        for explore in (True, False):
            body = {"obs": LARGE, "explore": explore}
            status, answer = collector.post("/v1/episodes/b/action", body)
            assert (status, answer["error"]["code"], answer["error"]["path"]) == (
                422,
                "invalid",
                "$.obs",
            )
            assert "version 1" in answer["error"]["message"]
        actions = [ask("a"), ask("b", LARGE), ask("c")]
        status, reply = collector.post("/v1/actions", {"actions": actions})
        assert status == 200
        assert list(map(outcome, reply["actions"])) == ["acted", "invalid", "acted"]
        assert reply["actions"][1]["error"]["path"] == "$.actions[1].obs"
        assert collector.get("/v1/episodes/b")[1]["next_seq"] == 1
        assert collector.post("/v1/episodes/b/log_action", {"obs": LARGE, "action": 0})[0] == 200


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_a_client_hears_of_an_overflow_and_goes_on(tmp_path: Path, mode: str) -> None:
    """In both modes the call raises the same ValueError and records nothing."""
    declare(tmp_path, observation="box:2")
    publish(WeightStore(tmp_path, "default"))
    with CollectorProcess(tmp_path) as collector:
        with PolicyClient(collector.address, mode) as client:  # type: ignore[arg-type]
            episode = client.start_episode()
            client.get_action(episode, [0.0, 0.0])
            with pytest.raises(Refusal, match="got one that overflows") as caught:
                client.get_action(episode, LARGE)
            assert (caught.value.code, caught.value.episode_id) == ("invalid", episode)
            client.get_action(episode, [0.0, 1.0])
            client.end_episode(episode)
        assert collector.stop() == 0
    assert [list(row["obs"]) for row in shard_rows(tmp_path)] == [[0.0, 0.0], [0.0, 1.0]]


def careless(root: Path) -> storage_store.WeightFolder:
    """The store of a tool that publishes without checks."""
    return storage_store.WeightFolder(root, "default", check=lambda candidate, weights: None)


def test_following_outlives_weights_that_nobody_foresaw(tmp_path: Path) -> None:
    """Unusable weights are logged, the last version stays in use, and the next one arrives."""
    root, log = tmp_path / "root", tmp_path / "log"
    declare(root, observation="box:2")
    store, pause = careless(root), threading.Event()
    publish(store)
    filtered = replace(SPEC, observation_filter="MeanStdFilter").to_json()
    stats = {"n": 1, "mean": {}, "s": [0.0, 0.0]}  # a TypeError for any reader of its mean
    state = {"kind": "MeanStdFilter", "clip": None, "stats": stats}
    with CollectorProcess(root, log=log) as collector, PolicyClient(collector.address) as client:
        episode = client.start_episode()
        client.get_action(episode, [0.0, 0.0])
        odd = store.add_candidate(
            WEIGHTS, spec=filtered, filter_state=state, metrics={}, lineage={}
        )
        store.publish(odd)
        for _ in range(6_000):
            if "are not served (unusable)" in log.read_text() or pause.wait(0.01):
                break
        collector.post("/v1/episodes", {"episode_id": "e"})
        reply = collector.post("/v1/episodes/e/action", {"obs": [0, 0]})
        assert (reply[0], reply[1]["policy_version"]) == (200, 1)
        store.publish(store.add_candidate(WEIGHTS, spec=SPEC.to_json(), metrics={}, lineage={}))
        local = client._actor.policy("default")  # the follower answers its long poll
        assert local.wait_newer(1, 60.0)
        assert local.version == 3


@pytest.mark.parametrize("cause", ["overflow", "spaces"])
def test_live_weights_that_cannot_act_are_not_taken_up(tmp_path: Path, cause: str) -> None:
    """Weights that were published by file, without a check, or before the policy's spaces changed
    are not taken up."""
    declare(tmp_path, observation="box:2" if cause == "overflow" else "box:3")
    weights = {**WEIGHTS, "pi.0.bias": np.array([3e38, 0], np.float32)}
    if cause == "overflow":
        weights["pi.0.weight"] = np.full((2, 2), 3e38, np.float32)
    store = careless(tmp_path)
    store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))
    with CollectorProcess(tmp_path) as collector:
        collector.post("/v1/episodes", {"episode_id": "e"})
        obs = [1, 1] if cause == "overflow" else [1, 1, 1]
        status, answer = collector.post("/v1/episodes/e/action", {"obs": obs})
        assert (status, answer["error"]["code"]) == (503, "no_version")


def test_an_action_counts_beside_the_events_that_it_brings(tmp_path: Path) -> None:
    """A request with an event and an action counts as two: the next one waits twice as long."""
    declare(tmp_path, observation="box:2")
    publish(WeightStore(tmp_path, "default"))
    token = create_token(tmp_path, "slow", ["log", "act"], rate=0.01)[1]
    headers = {"authorization": f"Bearer {token}"}
    start = {"type": "start", "episode_id": "e"}
    body = {"events": [start], "actions": [ask("e")]}
    with CollectorProcess(tmp_path) as collector:
        status, reply = collector.request("POST", "/v1/actions", body, headers)
        assert (status, list(map(outcome, reply["actions"]))) == (200, ["acted"])
        status, answer = collector.request("GET", "/v1/spec", None, headers)
        assert (status, answer["error"]["code"]) == (429, "busy")
        assert 150 < answer["error"]["retry_after"] <= 200


# --- in one turn --------------------------------------------------------------------------------


class Faulty(LivePolicies):
    """A build with a fault that one observation triggers."""

    def act(
        self,
        policy_id: str,
        schema_id: str,
        observations: Sequence[bytes],
        explore: bool,
        *,
        canary: bool = False,
    ) -> list[Choice | Refusal]:
        if np.full(2, 7.0, np.float32).tobytes() in observations:
            raise RuntimeError("planted")
        return super().act(policy_id, schema_id, observations, explore, canary=canary)


DEFAULT = PolicyDeclaration(observation=SPEC.observation, action=SPEC.action, seal_seconds=0.05)


async def together(*requests: wire.ActionBatch | None) -> list[Any]:
    """The outcomes of requests for the episodes `a`, `b` and `c` in one turn.

    None stands for a request whose caller leaves before its turn.
    """
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(running(MemoryJournal(), policy=DEFAULT))
        live = Faulty(None, {"default": DEFAULT})
        publish(live.store("default"))
        live.refresh()
        acting = Acting(collector, live)
        starts = [wire.Start(episode_id=name) for name in ("a", "b", "c")]
        collector.accept(wire.Batch(events=starts))
        waiting = [asyncio.ensure_future(acting.act(one or batch("c"))) for one in requests]
        await asyncio.sleep(0)  # all have asked, none is answered
        for request, task in zip(requests, waiting, strict=True):
            if request is None:
                task.cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
    return [
        list(map(what, one.actions)) if isinstance(one, wire.ActionsReply) else type(one)
        for one in found
    ]


def what(answer: wire.ActionReply) -> Any:
    return "acted" if answer.error is None else answer.error["code"]


def batch(name: str, obs: Sequence[float] = (0.0, 0.0)) -> wire.ActionBatch:
    return wire.ActionBatch(actions=[wire.GetAction(episode_id=name, obs=list(obs))])


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (batch("b", LARGE), ["invalid"]),
        (batch("b", [1.0, 2.0, 3.0]), ["invalid"]),
        (batch("nobody"), ["not_found"]),
        (batch("b", [7.0, 7.0]), RuntimeError),
        (None, asyncio.CancelledError),
    ],
)
def test_neighbours_in_a_turn_are_answered(bad: wire.ActionBatch | None, expected: Any) -> None:
    """The request between them may have any error, even an unknown fault."""

    async def body() -> None:
        assert await together(batch("a"), bad, batch("b" if bad is None else "c")) == [
            ["acted"],
            expected,
            ["acted"],
        ]

    run(body)


def test_a_choice_that_is_not_recorded_leaves_nothing(tmp_path: Path) -> None:
    """The caller gets all that it needs to send the decision itself, for an episode unknown to the
    collector. An error in one request is answered to that one alone."""
    declare(tmp_path, "box:2", "discrete:2")
    publish(WeightStore(tmp_path, "default"))
    with CollectorProcess(tmp_path) as collector:
        calls = [
            ask("nobody's") | {"policy_id": "default"},
            ask("other"),
            ask("short", [0.0]),
            ask("strange") | {"policy_id": "no"},
            ask("large", LARGE),
            ask("other"),
        ]
        status, answer = collector.post("/v1/actions", {"actions": calls, "record": False})
        assert status == 200
        found = answer["actions"]
        assert [one.get("error", {}).get("code") for one in found] == [
            None,
            None,
            "invalid",
            "invalid",
            "invalid",
            "invalid",
        ]
        assert found[0]["action"] in (0, 1)
        assert found[0].keys() >= {"stored", "action_dist_inputs", "action_logp", "policy_version"}
        start = {"type": "start", "episode_id": "a"}
        brought = {"actions": calls[:1], "events": [start], "record": False}
        assert collector.post("/v1/actions", brought)[0] == 422
        assert collector.get("/readyz")[1]["steps"] == 0
        assert collector.get("/v1/episodes/a")[0] == 404


def test_a_reply_ahead_of_the_disk_names_the_events_that_are_on_it() -> None:
    """A caller forgets its events up to `durable_seq`, so it is never one whose row is unsynced."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal, policy=DEFAULT) as collector:
            live = LivePolicies(None, {"default": DEFAULT})
            publish(live.store("default"))
            live.refresh()
            acting, instance = Acting(collector, live), await registered(collector)

            async def durable_seq(seq: int) -> int:
                call = wire.GetAction(episode_id="e", obs=[0.0, 0.0], seq=seq)
                asked = wire.ActionBatch(instance=instance, actions=[call], durable=False)
                return (await acting.act(asked)).actions[0].durable_seq

            start = wire.Start(episode_id="e", start=0)
            _, row = collector.accept(wire.Batch(instance=instance, events=[start]))
            await collector.journal.durable(row)
            found = []
            for pair in ((1, 2), (3, 4)):
                journal.gate.clear()
                found += [await durable_seq(seq) for seq in pair]
                journal.gate.set()
                await collector.journal.durable(collector.journal.submitted_row)
            assert found == [-1, -1, 2, 2]

    run(body)


class Hanging(LivePolicies):
    """Policies whose files are not read before `ready`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ready = asyncio.Event()

    async def look_for_first(self, policies: Collection[str]) -> None:
        await self.ready.wait()


def test_events_that_a_full_disk_discarded_are_not_acknowledged_with_an_action() -> None:
    """The disk was full while their request waited for weights, and the decision came after it."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal, policy=DEFAULT) as collector:
            live = Hanging(None, {"default": DEFAULT})
            publish(live.store("default"))
            live.refresh()
            action = wire.LogAction(episode_id="e", obs=[0.0, 0.0], action=0)
            begun = wire.Batch(events=[wire.Start(episode_id="e"), action])
            await collector.journal.durable(collector.accept(begun)[1])
            journal.errors.append(JournalFull("no space left"))
            asked = batch("e")
            asked.events = [wire.LogReturns(episode_id="e", reward=1.0)]
            acting = asyncio.ensure_future(Acting(collector, live).act(asked))
            while not collector.journal.rebuilds or collector.journal.rebuilding:
                await asyncio.sleep(0)
            live.ready.set()
            with pytest.raises(Refusal) as caught:
                await acting
            assert caught.value.code == "disk_full"

    run(body)
