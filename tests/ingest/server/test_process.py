"""The collector process, over HTTP, as used with curl."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
import requests

from ingest.backup import adopt_root
from ingest.client.policy_client import PolicyClient
from ingest.episodes.client_instances import MOST_RANGES
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.late_rewards import LateReward, late_rewards
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare, shard_rows

OBS = [0.1, -0.2, 0.3, 0.4]


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    with CollectorProcess(root) as process:
        yield process


def started(collector: CollectorProcess) -> str:
    status, answer = collector.post("/v1/episodes")
    assert status == 201
    name: str = answer["episode_id"]
    return name


def test_three_steps_over_json_become_rows(tmp_path: Path) -> None:
    """Acknowledged steps are in a shard once the collector has drained, with every value.

    Row: command set
    """
    declare(tmp_path, seal_seconds=60.0)
    with CollectorProcess(tmp_path) as collector:
        collector.post("/v1/episodes", {"episode_id": "e1", "tags": {"user": "u7"}})
        for t in range(3):
            step = {"obs": OBS, "action": t % 2, "action_prob": 0.5, "ts": 1000 + t}
            assert collector.post("/v1/episodes/e1/log_action", step)[0] == 200
            body = {"reward": t + 0.5, "info": {"t": t}}
            assert collector.post("/v1/episodes/e1/log_returns", body)[0] == 200
        assert collector.post("/v1/episodes/e1/end", {"obs": [1, 2, 3, 4]})[0] == 200
        assert collector.stop() == 0
    rows = shard_rows(tmp_path)
    assert [row["t"] for row in rows] == [0, 1, 2]
    assert [row["rewards"] for row in rows] == [0.5, 1.5, 2.5]
    assert [row["actions"] for row in rows] == [0, 1, 0]
    assert [row["ts"] for row in rows] == [1000, 1001, 1002]
    assert [row["infos"] for row in rows] == ['{"t": 0}', '{"t": 1}', '{"t": 2}']
    assert [row["terminateds"] for row in rows] == [False, False, True]
    assert rows[-1]["ended"] == "terminated"
    assert rows[0]["tags"] == '{"user":"u7"}'
    assert rows[0]["action_logp"] == pytest.approx(-0.6931, abs=1e-4)


BAD_ACTIONS: list[tuple[Any, int, str]] = [
    ({"obs": [1, 2, 3], "action": 0}, 422, "shape (4,)"),
    (b'{"obs": [1, 2, 3, 1e999], "action": 0}', 422, "out of range$.obs[3]"),
    (b'{"obs": [1, 2, 3, NaN], "action": 0}', 400, "JSON"),
    ({"obs": [1, 2, 3, "x"], "action": 0}, 422, "float32"),
    ({"obs": OBS, "action": 2}, 422, "an integer of 0..1"),
    ({"obs": OBS, "action": 0.5}, 422, "an integer of 0..1"),
    ({"obs": OBS, "action": 2**64}, 422, "action"),
    ({"obs": OBS, "action": 0, "action_prob": 0}, 422, "(0, 1]"),
    ({"obs": OBS, "action": 0, "action_prob": 1.5}, 422, "(0, 1]"),
    ({"obs": OBS, "action": 0, "action_prob": 0.5, "action_logp": -1.0}, 422, "got both"),
    ({"obs": OBS}, 422, "action"),
    ({"obs": OBS, "action": 0, "rewards": 1.0}, 422, "rewards"),
    (b"[" * 100_000, 422, "array"),
    (b'{"obs": ' + b"[" * 100_000, 400, "JSON"),
    (b'{"obs": ' + b"[" * 900 + b"]" * 900 + b', "action": 0}', 422, "obs"),
    (b'{"obs": ' + b"[" * 50 + b"]" * 50 + b', "action": 0}', 422, "obs"),
    ({"obs": OBS, "action": 0, "info": [1]}, 422, "info"),
    (b"", 400, "JSON"),
    (b'{"obs": "\\ud800", "action": 0}', 400, "half of a surrogate pair"),
    (b"\xff\xfe", 400, "JSON"),
]


BAD_MSGPACK: list[tuple[dict[str, Any], str]] = [
    ({"obs": [1, 2, 3, float("nan")], "action": 0}, "finite"),
    ({"obs": b"\xff" * 16, "action": 0}, "finite"),
    ({"obs": b"\0" * 12, "action": 0}, "12 bytes"),
    ({"obs": OBS, "action": 0, "reward": float("nan")}, "reward"),
    ({"obs": OBS, "action": 0, "action_logp": float("inf")}, "action_logp"),
    ({"obs": OBS, "action": 0, "info": {"x": float("nan")}}, "info"),
    ({"obs": OBS, "action": 0, "info": {"x": b"raw"}}, "info"),
    ({"obs": OBS, "action": 0, "info": {"x": {b"key": 1}}}, "info"),
]


@pytest.mark.parametrize(("body", "text"), BAD_MSGPACK)
def test_what_only_msgpack_can_say_is_refused_too(
    collector: CollectorProcess, body: dict[str, Any], text: str
) -> None:
    """NaN, raw bytes and odd keys get 422, and the episode is unchanged."""
    name = started(collector)
    found, answer = collector.request(
        "POST",
        f"/v1/episodes/{name}/log_action",
        msgspec.msgpack.encode(body),
        {"content-type": "application/msgpack"},
    )
    assert (found, answer["error"]["code"]) == (422, "invalid")
    assert text in answer["error"]["message"] + answer["error"]["path"]
    assert collector.get(f"/v1/episodes/{name}")[1]["steps"] == 0


@pytest.mark.parametrize(("body", "status", "text"), BAD_ACTIONS)
def test_a_bad_action_is_named_and_leaves_the_episode_as_it_was(
    collector: CollectorProcess, body: Any, status: int, text: str
) -> None:
    """The answer says what is wrong and where; the next good call on the episode works."""
    name = started(collector)
    found, answer = collector.post(f"/v1/episodes/{name}/log_action", body)
    assert found == status, answer
    assert text in answer["error"]["message"] + answer["error"].get("path", "")
    good = {"obs": OBS, "action": 0}
    assert collector.post(f"/v1/episodes/{name}/log_action", good)[0] == 200
    assert collector.get(f"/v1/episodes/{name}")[1]["steps"] == 1


def test_states_answer_with_the_texts_of_the_api(collector: CollectorProcess) -> None:
    """404, 409 and their texts, as clients of the older API expect them.

    Row: unknown id
    """
    status, answer = collector.post("/v1/episodes/nobody/end", {})
    assert (status, answer["error"]["message"]) == (404, "Episode nobody not found.")
    name = started(collector)
    status, answer = collector.post("/v1/episodes", {"episode_id": name})
    assert (status, answer["error"]["message"]) == (409, f"Episode {name} is already started")
    status, answer = collector.post(f"/v1/episodes/{name}/log_returns", {"reward": 1.0})
    assert (status, answer["error"]["code"]) == (409, "no_action")
    assert collector.post(f"/v1/episodes/{name}/end", {})[0] == 200
    status, answer = collector.post("/v1/episodes", {"episode_id": name})
    assert (status, answer["error"]["message"]) == (
        409,
        f"Episode {name} has already completed.",
    )


def test_a_late_reward_is_told_which_setting_refuses_it(collector: CollectorProcess) -> None:
    """With a reward window of 0, only the last step accepts rewards."""
    name = started(collector)
    for _ in range(2):
        collector.post(f"/v1/episodes/{name}/log_action", {"obs": OBS, "action": 0})
    status, answer = collector.post(f"/v1/episodes/{name}/log_returns", {"reward": 1, "step": 0})
    assert (status, answer["error"]["code"]) == (409, "window_closed")
    assert "reward_window" in answer["error"]["message"]
    deadline = time.monotonic() + 60
    kind = LateReward("default", -1, "a minute", 0)
    while late_rewards(collector.root, "default")[kind] == 0:
        assert time.monotonic() < deadline
        assert requests.get(f"{collector.address}/healthz", timeout=60).ok  # goes on meanwhile
    status, _ = collector.post(f"/v1/episodes/{name}/log_returns", {"reward": 1, "step": 1})
    assert status == 200


def test_a_batch_closes_a_broken_episode_and_no_other(collector: CollectorProcess) -> None:
    """An event of a batch that is refused for its content breaks its own episode only, and its
    refusal says so."""
    instance = collector.post("/v1/instances")[1]["instance"]
    events: list[dict[str, Any]] = []
    for number, name in enumerate(("bad", "good")):
        episode = f"{instance}-{name}"
        obs = [1, 2, 3] if name == "bad" else OBS
        events += [
            {"type": "start", "episode_id": episode, "start": number},
            {"type": "log_action", "episode_id": episode, "seq": 1, "obs": OBS, "action": 1},
            {"type": "log_action", "episode_id": episode, "seq": 2, "obs": obs, "action": 1},
            {"type": "end", "episode_id": episode, "seq": 3},
        ]
    status, answer = collector.post("/v1/events", {"instance": instance, "events": events})
    assert status == 200
    assert [item["index"] for item in answer["refused"]] == [2, 3]
    assert answer["refused"][0]["error"]["path"] == "$.events[2].obs"
    assert answer["refused"][0]["error"]["message"].endswith("; the episode has ended as broken")
    assert "has ended" not in collector.get(f"/v1/episodes/{instance}-bad")[1]["cause"]
    assert answer["refused"][1]["error"]["code"] == "broken"
    assert collector.get(f"/v1/episodes/{instance}-bad")[1]["state"] == "broken"
    assert collector.get(f"/v1/episodes/{instance}-good")[1]["state"] == "terminated"


def test_an_event_that_does_not_decode_closes_its_episode_if_it_is_alone(
    collector: CollectorProcess,
) -> None:
    """In a larger batch it does not, as nothing of that batch is accepted. Nor does another
    client's event, or one that was not the next: a good one with its seq would be refused alone.
    Nor does an error of the batch itself."""
    instance, other = (collector.post("/v1/instances")[1]["instance"] for _ in range(2))
    episode = f"{instance}-e"
    good = {"type": "log_action", "episode_id": episode, "seq": 1, "obs": OBS, "action": 1}
    bad = {"type": "log_returns", "episode_id": episode, "seq": 2, "reward": "much"}

    def post(*events: dict[str, Any], of: str = instance) -> tuple[int, Any]:
        return collector.post("/v1/events", {"instance": of, "events": events})

    def state() -> Any:
        return collector.get(f"/v1/episodes/{episode}")[1]["state"]

    assert post({"type": "start", "episode_id": episode, "start": 0})[0] == 200
    assert post(good, bad)[0] == post(bad, of=other)[0] == 422
    assert "has ended" not in post(bad, of=other)[1]["error"]["message"]
    assert post({**bad, "type": "start"})[0] == post({**bad, "episode_id": 7})[0] == 422
    for whole in ({"x": 1}, {"dropped": {"steps": -1}}):
        batch = {"instance": instance, "events": [good], **whole}
        assert collector.post("/v1/events", batch)[0] == 422
    assert state() == "open"
    assert post(good)[0] == 200
    assert [post({**bad, "seq": seq})[0] for seq in (0, 1, 3)] == [422] * 3
    assert state() == "open"
    status, answer = post(bad)
    assert (status, answer["error"]["path"]) == (422, "$.events[0].reward")
    assert answer["error"]["message"].endswith("; the episode has ended as broken")
    assert state() == "broken"
    assert "Expected `float`" in collector.get(f"/v1/episodes/{episode}")[1]["cause"]


def test_a_repeated_batch_changes_nothing(collector: CollectorProcess) -> None:
    """Same seq and content: the same answer, no effect. Other content: 409. A gap: 409."""
    instance = collector.post("/v1/instances")[1]["instance"]
    episode = f"{instance}-x"
    action = {"type": "log_action", "episode_id": episode, "seq": 1, "obs": OBS, "action": 1}
    events = [{"type": "start", "episode_id": episode, "start": 0}, action]
    batch = {"instance": instance, "events": events}
    assert collector.post("/v1/events", batch)[1]["accepted"] == 2
    repeated = collector.post("/v1/events", batch)[1]
    assert (repeated["accepted"], repeated["duplicates"]) == (0, 2)
    other = {"instance": instance, "events": [{**action, "action": 0}]}
    assert collector.post("/v1/events", other)[1]["refused"][0]["error"]["code"] == "conflict"
    gap = {"instance": instance, "events": [{**action, "seq": 7}]}
    error = collector.post("/v1/events", gap)[1]["refused"][0]["error"]
    assert (error["code"], error["expected_seq"]) == ("gap", 2)
    stranger = {"events": [{"type": "end", "episode_id": episode}]}
    assert collector.post("/v1/events", stranger)[1]["refused"][0]["error"]["code"] == "conflict"


def test_an_unknown_instance_is_refused(collector: CollectorProcess) -> None:
    """A start under an instance that was never registered could be a forgotten retry."""
    events = [{"type": "start", "episode_id": "late", "start": 0}]
    answer = collector.post("/v1/events", {"instance": "77-beef", "events": events})[1]
    assert answer["refused"][0]["error"]["code"] == "unknown_instance"


def test_a_client_whose_start_numbers_have_too_many_gaps_goes_on(
    collector: CollectorProcess,
) -> None:
    """Each refused start leaves a gap: a new instance takes new episodes, the old one the open
    ones.
    """

    def instances() -> float:
        text = requests.get(collector.address + "/metrics", timeout=60).text
        (line,) = (x for x in text.splitlines() if x.startswith("headrace_instances "))
        return float(line.partition(" ")[2])

    with PolicyClient(collector.address, timeout=30.0, max_wait=30.0) as client:
        collector.post("/v1/episodes", {"episode_id": "taken"})
        names = [client.start_episode()]
        client.flush()
        before = instances()
        for _ in range(MOST_RANGES + 1):
            with pytest.raises(ValueError, match="already started"):
                client.start_episode("taken")
            names.append(client.start_episode())
        client.flush()
        for name in names:
            client.log_action(name, OBS, 1)
            client.end_episode(name)
        client.flush()
        assert client.stats.refused == {"already_started": MOST_RANGES + 1}
    assert instances() == before + 1


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/nothing", {}, 404),
        ("DELETE", "/v1/events", {}, 405),
        ("POST", "/v1/events", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/events", {"content-encoding": "gzip"}, 415),
        ("POST", "/v1/steps", {"content-type": "application/json"}, 415),
    ],
)
def test_requests_that_do_not_fit_get_their_status(
    collector: CollectorProcess, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    found, answer = collector.request(method, path, {}, headers)
    assert found == status
    assert answer["error"]["message"]


def test_get_action_without_a_version_says_so(collector: CollectorProcess) -> None:
    name = started(collector)
    status, answer = collector.post(f"/v1/episodes/{name}/action", {"obs": OBS})
    assert (status, answer["error"]["code"]) == (503, "no_version")


def test_a_second_collector_on_one_root_is_refused(collector: CollectorProcess) -> None:
    """Two collectors would corrupt one journal; the second one's error names the holder."""
    with (
        pytest.raises(RuntimeError, match="did not start"),
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(CollectorProcess(collector.root))


def test_an_episode_survives_a_kill(tmp_path: Path) -> None:
    """Acknowledged steps of an open episode survive SIGKILL, and the episode goes on."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        collector.post("/v1/episodes", {"episode_id": "e"})
        for _ in range(5):
            collector.post("/v1/episodes/e/log_action", {"obs": OBS, "action": 1})
        collector.kill()
        collector.restart()
        assert collector.get("/v1/episodes/e")[1]["steps"] == 5
        collector.post("/v1/episodes/e/log_action", {"obs": OBS, "action": 0})
        collector.post("/v1/episodes/e/end", {})
        assert collector.stop() == 0
    assert [row["actions"] for row in shard_rows(tmp_path)] == [1, 1, 1, 1, 1, 0]


def test_a_repeated_get_action_gets_the_decision_that_was_made(tmp_path: Path) -> None:
    """A client whose answer was lost asks again and gets the stored decision."""
    declare(tmp_path, action="discrete:80", seal_seconds=60.0)
    spec = PolicySpec(parse_space("box:4"), parse_space("discrete:80"))
    store = WeightStore(tmp_path, "default")
    weights = Policy(spec, seed=1).get_weights()
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    with CollectorProcess(tmp_path) as collector:
        instance = collector.post("/v1/instances")[1]["instance"]
        start = {"type": "start", "episode_id": "e", "start": 0}
        ask = {"episode_id": "e", "seq": 1, "obs": OBS}
        first = {"instance": instance, "events": [start], "actions": [ask]}
        answers = [collector.post("/v1/actions", first)[1]["actions"][0] for _ in range(5)]
        assert "error" not in answers[0]
        assert all(answer == answers[0] for answer in answers)
        other = {"instance": instance, "actions": [{**ask, "obs": [1, 1, 1, 1]}]}
        refused = collector.post("/v1/actions", other)[1]["actions"][0]
        assert refused["error"]["code"] == "conflict"
        twice = {"instance": instance, "actions": [ask, ask]}
        again, double = collector.post("/v1/actions", twice)[1]["actions"]
        assert (again, double["error"]["code"]) == (answers[0], "invalid")
        end = {"type": "end", "episode_id": "e", "seq": 2}
        assert collector.post("/v1/events", {"instance": instance, "events": [end]})[0] == 200
        assert collector.stop() == 0
    (row,) = shard_rows(tmp_path)
    assert row["actions"] == answers[0]["action"]
    assert row["action_logp"] == answers[0]["action_logp"]


def test_a_reward_for_a_named_step_stays_out_of_its_clients_sequence(
    collector: CollectorProcess,
) -> None:
    """A reward for a named step has its own key and no number, so that any client may send it, also
    for the open step."""
    instance = collector.post("/v1/instances")[1]["instance"]
    name = f"{instance}-n"
    action = {"type": "log_action", "episode_id": name, "seq": 1, "obs": OBS, "action": 1}
    late = {"type": "log_returns", "episode_id": name, "reward": 1.0, "step": 0, "reward_id": "r"}
    end = {"type": "end", "episode_id": name, "seq": 2}
    events = [{"type": "start", "episode_id": name, "start": 0}, action, late, end]
    answer = collector.post("/v1/events", {"instance": instance, "events": events})[1]
    assert "refused" not in answer
    assert answer["accepted"] == 4
    assert collector.get(f"/v1/episodes/{name}")[1]["state"] == "terminated"


def test_a_restored_journal_gives_no_ordinal_twice(tmp_path: Path) -> None:
    """Shards unknown to the journal: it takes a new collector id, and loses nothing."""
    declare(tmp_path)
    backup = tmp_path / "backup"

    def log(name: str) -> None:
        with CollectorProcess(tmp_path) as collector:
            collector.post("/v1/episodes", {"episode_id": name})
            collector.post(f"/v1/episodes/{name}/log_action", {"obs": OBS, "action": 1})
            collector.post(f"/v1/episodes/{name}/end", {})
            assert collector.empty(60.0)
            assert collector.stop() == 0

    log("before")
    shutil.copytree(tmp_path / "journal", backup)
    log("between")
    shutil.rmtree(tmp_path / "journal")
    backup.rename(tmp_path / "journal")
    with pytest.raises(RuntimeError, match="the collector did not start"):
        log("refused")
    assert adopt_root(tmp_path) is not None
    log("after")
    assert sorted(row["eps_id"] for row in shard_rows(tmp_path)) == ["after", "before", "between"]
    assert len(list(tmp_path.glob("shards/*"))) == 2


def test_a_stuck_writer_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """SIGTERM ends the collector all the same; the next start writes the shard."""
    declare(tmp_path, seal_seconds=0.1)
    with CollectorProcess(tmp_path, drain_seconds=0.5) as collector:
        os.kill(collector.started_writer(), signal.SIGSTOP)
        collector.post("/v1/episodes", {"episode_id": "e"})
        collector.post("/v1/episodes/e/log_action", {"obs": OBS, "action": 1})
        collector.post("/v1/episodes/e/end", {})
        assert collector.stop() == 0
        assert shard_rows(tmp_path) == []
        collector.restart()
        assert collector.empty(60.0)
        assert collector.stop() == 0
    assert [row["eps_id"] for row in shard_rows(tmp_path)] == ["e"]


def test_a_stop_waits_for_the_writer_as_long_as_its_limit_says(tmp_path: Path) -> None:
    """With `drain_seconds=600`, the shard of a writer that was stopped is written all the same."""
    declare(tmp_path, seal_seconds=0.1)
    with CollectorProcess(tmp_path, drain_seconds=600.0) as collector:
        writer = collector.started_writer()
        os.kill(writer, signal.SIGSTOP)
        collector.post("/v1/episodes", {"episode_id": "e"})
        collector.post("/v1/episodes/e/log_action", {"obs": OBS, "action": 1})
        collector.post("/v1/episodes/e/end", {})
        collector.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            collector.process.wait(4.0)
        os.kill(writer, signal.SIGCONT)
        assert collector.wait() == 0
    assert [row["eps_id"] for row in shard_rows(tmp_path)] == ["e"]


def test_sums_of_rewards_stay_finite(collector: CollectorProcess) -> None:
    name = started(collector)
    collector.post(f"/v1/episodes/{name}/log_action", {"obs": OBS, "action": 0})
    large = {"reward": 1.7e308}
    assert collector.post(f"/v1/episodes/{name}/log_returns", large)[0] == 200
    status, answer = collector.post(f"/v1/episodes/{name}/log_returns", large)
    assert (status, "finite sum" in answer["error"]["message"]) == (422, True)


def test_a_probability_above_one_is_refused_as_a_logarithm_too(collector: CollectorProcess) -> None:
    name = started(collector)
    body = {"obs": OBS, "action": 0, "action_logp": 5.0}
    status, answer = collector.post(f"/v1/episodes/{name}/log_action", body)
    assert (status, answer["error"]["path"]) == (422, "$.action_logp")


def test_arrays_may_come_as_base64(collector: CollectorProcess) -> None:
    """The same bytes in JSON; NaN in them is reported as such."""
    name = started(collector)
    for values, expected in ((OBS, 200), ([1.0, float("nan"), 0.0, 0.0], 422)):
        data = base64.b64encode(np.array(values, "<f4").tobytes()).decode()
        obs = {"dtype": "float32", "shape": [4], "data": data}
        status, answer = collector.post(
            f"/v1/episodes/{name}/log_action", {"obs": obs, "action": 0}
        )
        assert status == expected
    assert "finite" in answer["error"]["message"]


@pytest.mark.parametrize("name", ["a/b", "../../etc/x", "%2F", "\u00e4 b"])
def test_any_id_can_be_addressed(collector: CollectorProcess, name: str) -> None:
    """Ids are data, never paths: a slash is %2F in a URL."""
    assert collector.post("/v1/episodes", {"episode_id": name})[0] == 201
    path = f"/v1/episodes/{quote(name, safe='')}"
    assert collector.post(f"{path}/log_action", {"obs": OBS, "action": 0})[0] == 200
    assert collector.post(f"{path}/end", {})[0] == 200
    assert collector.get(path)[1]["state"] == "terminated"
