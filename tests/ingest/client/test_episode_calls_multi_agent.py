"""Episodes of several agents through a real collector: joins, ends, kills, conflicts.

Also of `storage.declarations.mapping_functions`.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import ClientError, Refusal
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, shard_rows
from tests.collector_template import HOUR

SPACES = {"walker": ("box:2", "discrete:3"), "flyer": ("box:4", "discrete:2")}
SIZES = {"walker": 2, "flyer": 4}
PATIENT = {"late": ("box:2", "discrete:3")}  # takes late rewards, and has no version


def declare_two(root: Path, spaces: dict[str, Any] = SPACES, **rules: Any) -> None:
    """Declare the policies of `spaces`, by default two that differ in their spaces."""
    for name, (observation, action) in spaces.items():
        save_declaration(
            root,
            PolicyDeclaration(
                policy_id=name,
                observation=parse_space(observation),
                action=parse_space(action),
                **{"seal_seconds": 0.2, **rules},
            ),
        )


def publish_two(root: Path) -> None:
    """Publish both policies; they all but surely take action 1 if obs[0] > 0, else action 0."""
    for name, (observation, action) in SPACES.items():
        spec = PolicySpec(parse_space(observation), parse_space(action), ModuleSpec(hidden=()))
        weights = {key: np.zeros_like(w) for key, w in Policy(spec).get_weights().items()}
        size = (3 if name == "walker" else 2, SIZES[name])
        (key,) = (key for key, w in weights.items() if w.shape == size)
        weights[key][:2, 0] = [-1000.0, 1000.0]
        if name == "walker":
            (bias,) = (key for key, w in weights.items() if w.shape == (3,))
            weights[bias][2] = -1e6
        store = WeightStore(root, name)
        store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))


def policy_of(agent: str) -> str:
    """The policy walker for agent0 and names that start with walker, else the policy flyer."""
    return "walker" if agent == "agent0" or agent.startswith("walker") else "flyer"


def seen(agent: str, value: float) -> list[float]:
    return [value, *[0.5] * (SIZES[policy_of(agent)] - 1)]


def see(**values: float) -> dict[str, list[float]]:
    return {agent: seen(agent, value) for agent, value in values.items()}


Tracks = dict[tuple[str, str], list[dict[str, Any]]]


def tracks(root: Path) -> Tracks:
    """The stored rows by episode and agent, in order of t; each t must be there once."""
    found: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(shard_rows(root), key=lambda row: (row["eps_id"], row["agent_id"], row["t"])):
        found[row["eps_id"], row["agent_id"]].append(row)
    for rows in found.values():
        assert [row["t"] for row in rows] == list(range(len(rows)))
    return dict(found)


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [None if value != value else value for value in (row[name] for row in rows)]


@dataclass
class River:
    """One collector for all tests of this module; each test has episodes of its own."""

    root: Path
    collector: CollectorProcess

    def client(self, **options: Any) -> PolicyClient:
        return PolicyClient(self.collector.address, **options)

    def metrics(self) -> dict[str, float]:
        response = urllib3.request("GET", self.collector.address + "/metrics")
        lines = [line.rsplit(" ", 1) for line in response.data.decode().splitlines()]
        return {name: float(value) for name, value in lines if not name.startswith("#")}

    def tracks(self, steps: int, *names: str) -> Tracks:
        """The tracks of some episodes, once all their steps are in shards."""
        pause = threading.Event()
        for _ in range(600):
            found = {key: rows for key, rows in tracks(self.root).items() if key[0] in names}
            if sum(map(len, found.values())) >= steps:
                break
            pause.wait(0.05)
        assert sum(map(len, found.values())) == steps
        return found


@pytest.fixture(scope="module")
def river(tmp_path_factory: pytest.TempPathFactory) -> Iterator[River]:
    root = tmp_path_factory.mktemp("river")
    declare_two(root)
    declare_two(root, PATIENT, reward_window=60.0)
    publish_two(root)
    with CollectorProcess(root) as collector:
        yield River(root, collector)


@pytest.fixture(params=["local", "remote"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_agents_of_two_policies_join_late_and_leave_early(river: River, mode: str) -> None:
    """Each agent acts by its own policy. Its rows hold the time of each step (`env_t`), and at the
    episode's end the number of agents (`agents`)."""
    with river.client(inference_mode=mode, policy_mapping_fn=policy_of) as client:
        e = client.start_episode(f"join-{mode}", tags={"k": "v"})
        assert client.get_action(e, see(agent0=1, bird=-1)) == {"agent0": 1, "bird": 0}
        client.log_returns(e, {"agent0": 1.0}, {"bird": {"k": 1}})
        client.log_returns(e, {"agent0": 0.5, "bird": 2.0})
        assert client.get_action(e, see(bird=1)) == {"bird": 1}
        client.log_returns(e, {"bird": 3.0}, None, {"bird": True, "agent0": False})
        # bird's last observation, and a late joiner's first
        acted = client.get_action(e, see(bird=9, walker2=-1, agent0=-1))
        assert acted == {"walker2": 0, "agent0": 0}
        with pytest.raises(ValueError, match=r"ended agents, got some of \['bird'\]"):
            client.get_action(e, see(bird=1, agent0=1))
        with pytest.raises(ValueError, match=f"Episode {e}, agent bird has already completed"):
            client.log_returns(e, {"bird": 1.0})
        client.log_action(e, see(walker2=7), {"walker2": 2}, action_prob={"walker2": 0.25})
        client.log_returns(e, {"walker2": 4.0}, multiagent_truncated_dict={"walker2": True})
        client.end_episode(e, see(agent0=5, walker2=8))
        with pytest.raises(ValueError, match=f"Episode {e} has already completed"):
            client.log_returns(e, {"agent0": 1.0})
        client.flush()
        assert client.stats.waiting == 0  # nothing is kept once it is on disk
        status, state = river.collector.get(f"/v1/episodes/{e}")
        assert (status, state["state"]) == (200, "truncated")
        assert {a: s["state"] for a, s in state["agents"].items()} == {
            "agent0": "terminated",
            "bird": "terminated",
            "walker2": "truncated",
        }
    found = river.tracks(6, e)
    assert set(found) == {(e, "agent0"), (e, "bird"), (e, "walker2")}
    agent0, bird, late = (found[e, name] for name in ("agent0", "bird", "walker2"))
    assert column(agent0, "env_t") == [0, 2]
    assert column(bird, "env_t") == [0, 1]
    assert column(late, "env_t") == [2, 3]
    assert column(agent0, "rewards") == [1.5, 0.0]
    assert column(bird, "rewards") == [2.0, 3.0]
    assert json.loads(bird[0]["infos"]) == {"k": 1}
    assert column(late, "rewards") == [0.0, 4.0]
    assert column(late, "source") == ["on_policy", "logged"]
    assert column(late, "action_logp")[1] == pytest.approx(np.log(0.25))
    assert column(agent0, "agents") == [None, 3]
    assert column(bird, "agents") == [None, None]
    assert column(late, "agents") == [None, 3]
    assert [rows[-1]["ended"] for rows in (agent0, bird, late)] == [
        "terminated",
        "terminated",
        "truncated",
    ]
    finals = [rows[-1]["final_obs"][0] for rows in (agent0, bird, late)]
    assert finals == [5.0, 9.0, 8.0]
    assert {row["policy_id"] for row in (*agent0, *late)} == {"walker"}
    assert {row["tags"] for rows in found.values() for row in rows} == {'{"k":"v"}'}


def test_agents_take_turns_and_nobody_who_waits_is_abandoned(tmp_path: Path) -> None:
    """An agent that waits is not abandoned while another one acts. When no agent sends anything for
    the time-out, all of them are abandoned."""
    declare_two(tmp_path, episode_timeout=1.5 * HOUR)
    with CollectorProcess(tmp_path) as collector:
        with PolicyClient(collector.address) as client:
            e = client.start_episode("e", policy_id={"walker1": "walker", "bird": "flyer"})
            silent = client.start_episode(policy_id={"walker1": "walker"})
            for name in (e, silent):
                client.log_action(name, see(walker1=1), {"walker1": 0})
            for _ in range(5):  # walker1 waits for longer than the time-out
                client.log_action(e, see(bird=1), {"bird": 0})
                client.flush()
                collector.turn_clock()
            collector.await_abandoned(silent)  # so the collector has looked for timed-out episodes
            client.log_action(e, see(walker1=1), {"walker1": 0})
            client.flush()
            collector.turn_clock()
            collector.turn_clock()
            collector.await_abandoned(e)
            client.log_action(e, see(bird=1), {"bird": 0})
            with pytest.raises(
                Refusal, match=r"e with all .* \(this is one of agent bird\)"
            ) as caught:
                client.flush()
            assert (caught.value.episode_id, caught.value.agent_id) == ("e", "bird")
            assert client.stats.refused == {"abandoned": 1}
            with pytest.raises(ValueError, match="was abandoned"):
                client.log_action(e, see(walker1=1), {"walker1": 0})
            with pytest.raises(ValueError, match="abandoned"):
                client.end_episode(e)
        assert collector.stop() == 0
    found = tracks(tmp_path)
    assert {key: (len(rows), rows[-1]["ended"]) for key, rows in found.items()} == {
        ("e", "walker1"): (2, "abandoned"),
        (silent, "walker1"): (1, "abandoned"),
        ("e", "bird"): (5, "abandoned"),
    }
    assert column(found["e", "walker1"], "env_t") == [0, 6]


def test_training_enabled_false_holds_for_every_agent(river: River) -> None:
    """The rows of an agent that joins late are marked, too."""
    with river.client(policy_mapping_fn=policy_of) as client:
        e = client.start_episode(training_enabled=False)
        client.log_action(e, see(bird=1), {"bird": 0})
        client.log_action(e, see(bird=1, agent0=1), {"bird": 0, "agent0": 0})
        client.end_episode(e)
    rows = [row for track in river.tracks(3, e).values() for row in track]
    assert not any(row["training_enabled"] for row in rows)


def test_a_killed_collector_has_every_agents_steps_once(tmp_path: Path, mode: str) -> None:
    """The collector gets SIGKILL twice in the middle of three episodes. Each step of each agent is
    stored once, in its own track."""
    declare_two(tmp_path)
    publish_two(tmp_path)
    steps = 9
    with CollectorProcess(tmp_path) as collector:
        with PolicyClient(
            collector.address, inference_mode=mode, policy_mapping_fn=policy_of
        ) as client:
            client.update_policy_weights("walker")
            client.update_policy_weights("flyer")
            names = [client.start_episode(f"e{i}") for i in range(3)]
            for t in range(steps):
                if t % 4 == 2:
                    collector.kill()
                    collector.restart()
                for name in names:
                    agents = {"bird": t + 1.0, **({"agent0": t + 1.0} if t % 2 else {})}
                    client.get_action(name, see(**agents))
                    client.log_returns(name, dict.fromkeys(agents, float(t)))
            for name in names:
                client.end_episode(name, see(bird=0))
        assert collector.stop() == 0
        collector.restart()
        assert collector.stop() == 0
    found = tracks(tmp_path)
    assert len(found) == 6
    for (_, agent), rows in found.items():
        clock = list(range(steps)) if agent == "bird" else list(range(1, steps, 2))
        assert column(rows, "env_t") == clock
        assert column(rows, "rewards") == [float(t) for t in clock]
        assert [row["obs"][0] for row in rows] == [t + 1.0 for t in clock]
        assert column(rows, "agents")[-1] == 2


def test_two_clients_do_not_mix_in_one_episode(river: River) -> None:
    """The second client that starts an episode of the same id is refused: with `sync` at its start,
    else by its next flush or call."""
    clients = [
        river.client(policy_mapping_fn=policy_of, sync=sync, max_wait=10.0)
        for sync in (False, False, True, True)
    ]
    first, second, third, fourth = clients
    first.start_episode("e")
    second.start_episode("e")  # the first client has sent no event yet
    first.log_action("e", see(bird=1), {"bird": 0})
    first.flush()
    with pytest.raises(ValueError, match="Episode e is already started"):
        third.start_episode("e")
    second.log_action("e", see(agent0=1), {"agent0": 0})
    with pytest.raises(Refusal, match="was started by another client"):
        second.flush()
    with pytest.raises(ValueError, match="started by another client"):
        second.log_action("e", see(agent0=1), {"agent0": 0})
    first.end_episode("e")
    first.flush()
    with pytest.raises(ValueError, match="Episode e has already completed"):
        third.start_episode("e")
    with pytest.raises(ValueError, match="Episode e has already completed"):
        third.start_episode("e", policy_id="walker")  # as an episode of one agent
    third.start_episode("one", policy_id="walker")
    with pytest.raises(ValueError, match="Episode one is already started"):
        fourth.start_episode("one")
    third.end_episode("one")
    for client in clients:
        client.close()
    assert set(river.tracks(1, "e", "one")) == {("e", "bird")}


def test_what_is_said_wrongly_is_refused_in_the_call_and_nothing_of_it_is_kept(
    river: River,
) -> None:
    """A call with one bad value raises and changes no agent; the good values succeed afterwards."""
    with pytest.raises(ValueError, match="Policy mapping function not callable"):
        PolicyClient("localhost:1", policy_mapping_fn="walker")  # type: ignore[arg-type]
    with river.client(max_wait=20.0) as client:  # long enough to fetch the declarations
        mapping = {"agent0": "walker", "bird": "flyer", "x": "y", "new": "late"}
        e = client.start_episode("w", policy_id=mapping)
        act = {"agent0": 0, "bird": 0}
        good = see(agent0=1, bird=1)
        client.log_action(e, good, act)
        for call, text in (
            (lambda: client.get_action(e, [1.0]), "Episode w: obs: expected a mapping by"),
            (lambda: client.log_returns(e, 1.0), "Episode w: reward: expected a mapping"),
            (lambda: client.get_action(e, {}), "expected the observation of an agent"),
            (
                lambda: client.log_action(e, {**good, "bird": [1]}, act),
                "Episode w, agent bird: obs: expected",
            ),
            (
                lambda: client.log_action(e, good, {**act, "bird": 9}),
                "Episode w, agent bird: action: expected",
            ),
            (
                lambda: client.log_action(e, good, {"agent0": 0}),
                r"expected actions of the agents \['agent0', 'bird'\], got \['agent0'\]",
            ),
            (
                lambda: client.log_action(e, good, act, action_prob={"bird": 1.5}),
                "Episode w, agent bird: action_prob: expected",
            ),
            (
                lambda: client.log_action(e, good, act, action_prob={"brid": 0.5}),
                r"propensities of acting agents only, got some of \['brid'\]",
            ),
            (
                lambda: client.log_returns(e, {"agent0": 1.0, "bird": float("nan")}),
                "Episode w, agent bird: reward: expected a finite number",
            ),
            (
                lambda: client.log_returns(e, {"agent0": 1.0, "z": 1.0}),
                "Episode w: a reward came before any action of z",
            ),
            (
                lambda: client.log_returns(e, {}, None, {"__all__": True}),
                "Episode w: end_episode ends the episode of all agents",
            ),
            (
                lambda: client.log_action(e, {"z": [1]}, {"z": 0}),
                r"Could not find policy for agent 'z': policy_id has the agents \['agent0', ",
            ),
            (
                lambda: client.log_action(e, {"x": [1]}, {"x": 0}),
                "Could not find policy for agent 'x': policy_id gave 'y'; policy_id: expected",
            ),
            (lambda: client.log_action(e, {3: [1]}, {3: 0}), "agent_id: expected a string"),
            (
                lambda: client.log_step(good, act, 1.0, policy_id={"bird": "flyer"}),
                "policy_id: expected the id of one policy",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                call()
        with pytest.raises(Refusal, match="has no published version"):
            client.get_action(e, {**good, "new": [1, 2]})
        client.log_action(e, good, act)  # the refused calls changed nothing
        client.log_returns(e, {"agent0": 1.0, "bird": 2.0})
        client.end_episode(e)

        alone = client.start_episode("alone", policy_id="walker")
        client.log_action(alone, [1, 2], 0)
        for call, text in (
            (lambda: client.log_returns(alone, {"a": 1.0}), "Episode alone: expected one rew"),
            (lambda: client.log_returns(alone, 1.0, None, {"a": True}), "policy_mapping_fn"),
            (lambda: client.log_action(alone, {"a": [1, 2]}, {"a": 0}), "one agent"),
            (lambda: client.get_action(alone, {"a": [1, 2]}), "one agent"),
            (lambda: client.end_episode(alone, {"a": [1, 2]}), "one agent"),
        ):
            with pytest.raises(ValueError, match=text):
                call()
        client.end_episode(alone)
    found = river.tracks(5, "w", "alone")
    assert {key: len(rows) for key, rows in found.items()} == {
        ("w", "agent0"): 2,
        ("w", "bird"): 2,
        ("alone", "agent0"): 1,
    }
    assert column(found["w", "bird"], "env_t") == [0, 1]
    assert column(found["w", "bird"], "rewards") == [0.0, 2.0]
    assert column(found["alone", "agent0"], "env_t") == [None]


def test_a_reward_of_an_agents_step_that_is_not_logged_is_not_the_earlier_ones(
    river: River,
) -> None:
    """After an agent's action was refused, a reward for that agent raises, and does not go to its
    earlier step. An agent without an action in that call may get a reward."""
    with river.client(max_wait=20.0) as client:
        e = client.start_episode("m", policy_id={"agent0": "walker", "bird": "flyer"})
        client.log_action(e, see(agent0=1, bird=1), {"agent0": 0, "bird": 0})
        with pytest.raises(ValueError, match="action: expected"):
            client.log_action(e, see(bird=2), {"bird": 9})
        client.log_returns(e, {"agent0": 1.0})
        with pytest.raises(ValueError, match="bird: the action of this step is not logged"):
            client.log_returns(e, {"agent0": 2.0, "bird": 2.0})
        client.log_action(e, see(bird=2), {"bird": 1})
        client.log_returns(e, {"bird": 2.0})
        client.end_episode(e)
    found = river.tracks(3, e)
    assert column(found[e, "agent0"], "rewards") == [1.0]
    assert column(found[e, "bird"], "rewards") == [0.0, 2.0]


def test_the_mapping_function_is_asked_once_per_agent_and_may_take_the_episode(
    river: River,
) -> None:
    """The function gets the agent and the episode, once for each pair. If it returns None, the
    agent acts by the client's own policy."""
    asked: list[tuple[str, str]] = []

    def choose(agent: str, episode: str) -> str | None:
        asked.append((agent, episode))
        return None if agent == "bird" else "walker"

    with river.client(policy_id="flyer", policy_mapping_fn=choose) as client:
        for name in ("m1", "m2"):
            client.start_episode(name)
            for _ in range(3):
                client.log_action(name, see(bird=1, agent0=1), {"bird": 0, "agent0": 0})
            client.end_episode(name)
    assert asked == [(a, e) for e in ("m1", "m2") for a in ("bird", "agent0")]
    assert {key: rows[0]["policy_id"] for key, rows in river.tracks(12, "m1", "m2").items()} == {
        (e, a): p for e in ("m1", "m2") for a, p in (("bird", "flyer"), ("agent0", "walker"))
    }


def test_a_list_of_episodes_is_one_request(river: River, mode: str) -> None:
    """get_action takes a list of ids and a mapping of id -> observations by agent. In remote mode
    the collector runs one forward pass for each policy."""
    with river.client(inference_mode=mode, policy_mapping_fn=policy_of) as client:
        before = river.metrics()
        names = [client.start_episode() for _ in range(3)]
        wanted = {name: see(bird=i - 0.5, agent0=0.5 - i) for i, name in enumerate(names)}
        got = client.get_action(names, wanted)
        assert got == {
            name: {"bird": int(i > 0), "agent0": int(i < 1)} for i, name in enumerate(names)
        }
        alone = client.start_episode(policy_id="walker")
        client.flush()
        after = river.metrics()
        # six tracks, and the lone one
        assert after["headrace_open_episodes"] - before["headrace_open_episodes"] == 7
        forwards = after["headrace_forwards_total"] - before["headrace_forwards_total"]
        assert forwards == (2 if mode == "remote" else 0)
        for name in (*names, alone):
            client.end_episode(name)
    assert {len(rows) for rows in river.tracks(6, *names).values()} == {1}


def test_a_refused_get_action_may_be_repeated_as_it_was(tmp_path: Path) -> None:
    """Remote get_action is refused while the policies have no version, and succeeds unchanged once
    they have one. The final observation of an ended agent, which the call carries, is stored."""
    declare_two(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        with PolicyClient(
            collector.address, inference_mode="remote", policy_mapping_fn=policy_of
        ) as client:
            e = client.start_episode("e")
            client.log_action(e, see(walker1=1, bird=1), {"walker1": 0, "bird": 0})
            client.log_returns(e, {"walker1": 1.0}, None, {"walker1": True})
            asked = see(walker1=3, agent0=1, bird=1)
            for _ in range(2):
                with pytest.raises(Refusal, match="version"):
                    client.get_action(e, asked)
            publish_two(tmp_path)
            assert client.get_action(e, asked) == {"agent0": 1, "bird": 1}
            with pytest.raises(ValueError, match="ended agents, got some of"):
                client.get_action(e, see(walker1=3, bird=1))
            client.end_episode(e)
        assert collector.stop() == 0
    found = tracks(tmp_path)
    assert column(found["e", "walker1"], "agents") == [None]
    assert found["e", "walker1"][0]["final_obs"][0] == 3.0
    assert column(found["e", "agent0"], "env_t") == [1]
    assert column(found["e", "bird"], "env_t") == [0, 1]
    assert column(found["e", "bird"], "agents") == [None, 3]


def test_a_named_step_of_an_agent_takes_a_late_reward(river: River) -> None:
    """`step` counts the agent's own steps. Any client may send the reward, and one with a known
    `reward_id` is counted as a duplicate."""
    with (
        river.client(policy_mapping_fn=lambda agent: "late") as client,
        river.client() as other,
    ):
        e = client.start_episode("n")
        for _ in range(3):
            client.log_action(e, {"bird": [1, 2], "agent0": [1, 2]}, {"bird": 0, "agent0": 0})
        client.flush()
        other.log_returns("n", {"bird": 5.0}, {"bird": {"k": 1}}, step=1, reward_id="r")
        other.log_returns("n", {"bird": 5.0}, {"bird": {"k": 1}}, step=1, reward_id="r")
        other.log_returns("n", {"bird": 1.0, "agent0": 2.0}, step=0)
        other.flush()
        assert other.stats.duplicates == 1
        with pytest.raises(ValueError, match="step: expected one with a reward_id"):
            other.log_returns("n", {"bird": 1.0}, reward_id="r")
        other.log_returns("n", 1.0, step=0)
        with pytest.raises(Refusal, match="It has several agents: expected an agent_id"):
            other.flush()
    status, state = river.collector.get("/v1/episodes/n")
    assert (status, state["agents"]["bird"]["steps"]) == (200, 3)


def test_a_lost_answer_is_asked_for_again_by_all_agents(river: River) -> None:
    """The answer to one agent's get_action was lost. Each other call on the episode raises, until
    get_action is repeated with the same observation for that agent."""
    client = river.client(inference_mode="remote", policy_mapping_fn=policy_of)
    e = client.start_episode("l")
    client.get_action(e, see(bird=1, agent0=1))
    tracks_here = client._book.wholes[e].tracks
    request = client._remote._request(tracks_here["bird"], seen("bird", 2), 1)
    tracks_here["bird"].unanswered = request
    for call in (
        lambda: client.get_action(e, see(agent0=2)),
        lambda: client.log_action(e, see(bird=2), {"bird": 0}),
        lambda: client.end_episode(e),
    ):
        with pytest.raises(ClientError, match="get_action was lost"):
            call()
    assert client.get_action(e, see(bird=2, agent0=2)) == {"bird": 1, "agent0": 1}
    client.end_episode(e)
    client.close()
