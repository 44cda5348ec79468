"""A call with an Idempotency-Key may be repeated, and takes effect once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.access.key_files import create_token
from ingest.episodes.idempotency import Given, KeyBook
from ingest.episodes.journal_events import Keyed
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults.decisions import ACTIONS, publish
from tests.ingest.raw_http import connect

OBS = [0.1, -0.2, 0.3, 0.4]


def call(collector: CollectorProcess, path: str, body: Any, key: str) -> tuple[int, Any]:
    return collector.post(f"/v1/episodes{path}", body, **{"idempotency-key": key})


def episode(collector: CollectorProcess) -> list[tuple[int, Any]]:
    """Make the calls of a short episode, each under its own key; return all answers."""
    status, started = call(collector, "", {}, "s")
    name = started["episode_id"]
    return [
        (status, started),
        call(collector, f"/{name}/log_action", {"obs": OBS, "action": 0}, "a"),
        call(collector, f"/{name}/log_returns", {"reward": 1.0, "info": {"email": "x"}}, "r"),
        call(collector, f"/{name}/log_action", {"obs": OBS, "action": 1}, "b"),
        call(collector, f"/{name}/end", {}, "e"),
    ]


def test_a_repeated_call_has_the_same_answer_and_no_effect(tmp_path: Path) -> None:
    """A repeated call gets the same answer after a kill, when its rows are in a shard, and when its
    episode is over."""
    declare(tmp_path, redact={"infos.email": "drop"})
    with CollectorProcess(tmp_path) as collector:
        first = episode(collector)
        assert [status for status, _ in first] == [201, 200, 200, 200, 200]
        assert episode(collector) == first
        collector.kill()
        collector.restart()
        assert episode(collector) == first
        collector.settle(2)
        collector.kill()
        collector.restart()
        assert episode(collector) == first
        assert collector.get("/readyz")[1]["steps"] == 2
        collector.settle(2)
    assert [row["rewards"] for row in shard_rows(tmp_path)] == [1.0, 0.0]


def test_a_repeated_call_is_known_whatever_other_policies_there_are(tmp_path: Path) -> None:
    """An ended episode's calls are read by its own policy's rules, over kills and shards."""
    shop = {"infos.email": "drop", "obs": "drop"}
    declare(tmp_path, policy_id="other")
    declare(tmp_path, policy_id="shop", redact=shop)
    calls: list[tuple[str, Any]] = [
        ("", {"episode_id": "e", "policy_id": "shop"}),
        ("/e/log_action", {"obs": OBS, "action": 0}),
        ("/e/log_returns", {"reward": 1.0, "info": {"email": "x"}}),
        ("/e/end", {"obs": OBS}),
    ]

    def statuses() -> list[int]:
        return [
            call(collector, path, body, str(number))[0] for number, (path, body) in enumerate(calls)
        ]

    with CollectorProcess(tmp_path) as collector:
        assert statuses() == [201, 200, 200, 200]
        assert statuses() == [201, 200, 200, 200]
        collector.kill()
        collector.restart()
        assert statuses() == [201, 200, 200, 200]
        collector.settle(1)
        collector.kill()
        declare(tmp_path, "box:3", policy_id="shop", redact=shop)
        collector.restart()
        assert statuses() == [201, 200, 200, 200]
        assert call(collector, "/e/end", {"obs": [0.0] * 3}, "3")[0] != 200
        assert collector.get("/readyz")[1]["steps"] == 1


@pytest.mark.parametrize(
    ("path", "body", "instead"),
    [
        ("events", {"events": []}, "number the events"),
        ("actions", {"actions": []}, "number the events"),
        ("instances", {}, "a name in the body"),
    ],
)
def test_a_key_is_refused_where_it_would_do_nothing(
    house: CollectorProcess, path: str, body: Any, instead: str
) -> None:
    """No caller relies on an ignored key; the answer names the alternative."""
    assert house.post(f"/v1/{path}", body)[0] in (200, 201)
    status, answer = house.post(f"/v1/{path}", body, **{"idempotency-key": "k"})
    assert (status, answer["error"]["path"]) == (422, "Idempotency-Key")
    assert instead in answer["error"]["message"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("house")
    declare(root)
    with CollectorProcess(root) as collector:
        yield collector


def test_a_key_with_other_content_is_a_conflict(tmp_path: Path) -> None:
    """A key is bound to its episode and content, and the refusal has no effect."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        for name in ("one", "two"):
            call(collector, "", {"episode_id": name}, "k")
            assert call(collector, f"/{name}/log_action", {"obs": OBS, "action": 0}, "a")[0] == 200
        for path, body in (
            ("/one/log_action", {"obs": OBS, "action": 1}),
            ("/one/log_returns", {"reward": 1.0}),
            ("/one/end", {}),
            ("", {"episode_id": "one", "tags": {"a": "b"}}),
        ):
            status, answer = call(collector, path, body, "k" if path == "" else "a")
            error = answer["error"]
            assert (status, error["code"], error["path"]) == (409, "conflict", "Idempotency-Key")
            assert "was used with other content" in error["message"]
        assert collector.get("/v1/episodes/one")[1]["next_seq"] == 2
        for length, status in ((0, 422), (200, 200), (201, 422)):
            assert call(collector, "/two/log_returns", {"reward": 1.0}, "x" * length)[0] == status


def test_a_key_is_its_tokens(tmp_path: Path) -> None:
    """The same call with the same key from two tokens is two calls, each with its own retries."""
    declare(tmp_path)
    tokens = [create_token(tmp_path, name, ["log"])[1] for name in ("one", "two")]
    with CollectorProcess(tmp_path) as collector:

        def post(path: str, body: Any, token: str) -> tuple[int, Any]:
            headers = {"idempotency-key": "k", "authorization": f"Bearer {token}"}
            return collector.post(f"/v1/episodes{path}", body, **headers)

        post("", {"episode_id": "e"}, tokens[0])
        assert post("/e/log_action", {"obs": OBS, "action": 0}, tokens[0])[0] == 409
        for _ in range(2):
            assert post("/e/log_action", {"obs": OBS, "action": 1}, tokens[1])[0] == 200
        read = {"authorization": f"Bearer {tokens[0]}"}
        assert collector.request("GET", "/v1/episodes/e", None, read)[1]["steps"] == 1
        status, answer = post("/e/log_action", {"obs": OBS, "action": 0}, tokens[1])
        assert status == 409
        assert "'k' of Episode e was used with other" in answer["error"]["message"]


BIG = str(2**64)
BIG_VALUES = {
    ("log_returns", '{"reward": 1, "info": {"a": %s}}'): 200,
    ("log_returns", '{"reward": 1, "info": {"a": [{"b": -%s}]}}'): 200,
    ("log_returns", '{"reward": 1, "info": {"a": %s%s%s}}'): 200,
    ("log_action", '{"obs": [%s, 0, 0, 0], "action": 0}'): 422,
    ("log_action", '{"obs": [0, 0, 0, 0], "action": %s}'): 422,
    ("action", '{"obs": [%s, 0, 0, 0]}'): 422,
    ("end", '{"obs": [%s, 0, 0, 0]}'): 422,
}


def test_a_key_changes_nothing_of_what_is_taken(tmp_path: Path) -> None:
    """Integers of any size are valid content; no request ends in a 500."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        for name in ("with", "without"):
            collector.post("/v1/episodes", {"episode_id": name})
            collector.post(f"/v1/episodes/{name}/log_action", {"obs": OBS, "action": 0})
        for number, ((path, body), status) in enumerate(BIG_VALUES.items()):
            content = body.replace("%s", BIG).encode()
            other = body.replace("%s", str(2**64 + 2**60)).encode()
            assert collector.post(f"/v1/episodes/without/{path}", content)[0] == status
            found = [
                call(collector, f"/with/{path}", sent, str(number))[0]
                for sent in (content, content, other)
            ]
            assert found == [status, status, 409 if status == 200 else status]


def test_no_depth_of_a_keyed_call_is_an_error_of_the_server(tmp_path: Path) -> None:
    """A body that is nested too deeply gets the same refusal with a key as without."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        collector.post("/v1/episodes", {"episode_id": "e"})
        collector.post("/v1/episodes/e/log_action", {"obs": OBS, "action": 0})
        pairs = (("[", "]"), ('{"a":', "}"))
        depths = (30, 33, 400, *range(880, 1000, 8), 2000)
        for depth, (opens, closes) in itertools.product(depths, pairs):
            nested = opens * depth + "1" + closes * depth
            for path, body in (
                ("log_returns", f'{{"reward": 1, "info": {{"a": {nested}}}}}'),
                ("log_action", f'{{"obs": {nested}, "action": 0}}'),
                ("action", f'{{"obs": {nested}}}'),
            ):
                taken = path == "log_returns" and depth < 32
                expected = (200,) if taken else (400, 413, 422, 503)
                for key in ({}, {"idempotency-key": f"{path}{depth}{opens[0]}"}):
                    answer = collector.post(f"/v1/episodes/e/{path}", body.encode(), **key)
                    assert answer[0] in expected, (depth, path, key, answer)


def test_a_digest_stays_what_journals_hold() -> None:
    """Content that msgpack can express has the digest of its msgpack."""
    message = wire.LogReturns(episode_id="e", reward=1.0, info={"a": [2**63, None, "x"]})
    assert Given.of("k", "i", message).digest.hex() == "e22058564793e05d7037ce5e28fe2efc"


def test_a_refused_call_uses_up_no_key(tmp_path: Path) -> None:
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        call(collector, "", {"episode_id": "e"}, "s")
        assert call(collector, "/e/log_action", {"obs": [1], "action": 0}, "a")[0] == 422
        assert call(collector, "/e/log_action", {"obs": OBS, "action": 0}, "a")[0] == 200


def test_a_kill_between_commit_and_acknowledgement_doubles_nothing(tmp_path: Path) -> None:
    """The key is in the same transaction as the event."""
    declare(tmp_path)
    body = json.dumps({"obs": OBS, "action": 0}).encode()
    with CollectorProcess(tmp_path) as collector:
        call(collector, "", {"episode_id": "e"}, "s")
    with (
        CollectorProcess(tmp_path, program=("-m", "tests.ingest.unanswering_collector")) as silent,
        connect(silent.port) as connection,
    ):
        connection.sendall(
            b"POST /v1/episodes/e/log_action HTTP/1.1\r\nHost: localhost\r\n"
            b"Idempotency-Key: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        while silent.get("/v1/episodes/e")[1]["next_seq"] < 2:
            pass
        while not committed(silent):
            pass
        silent.kill()
    with CollectorProcess(tmp_path) as collector:
        assert collector.get("/v1/episodes/e")[1]["next_seq"] == 2
        answer = call(collector, "/e/log_action", {"obs": OBS, "action": 0}, "a")
        assert answer == (200, {"durable": True, "accepted": 1})
        assert collector.get("/v1/episodes/e")[1]["next_seq"] == 2


def committed(collector: CollectorProcess) -> bool:
    """Whether everything accepted is on disk."""
    text = collector._pool.request("GET", f"{collector.address}/metrics").data.decode()
    return "\nheadrace_durable_lag_rows 0.0\n" in text


def test_a_repeated_request_for_an_action_has_the_same_answer(tmp_path: Path) -> None:
    """A repeated request gets the same action, also over a kill. Once the episode has gone on, the
    answer is dropped and the refusal says so.
    """
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    publish(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        call(collector, "", {"episode_id": "e"}, "s")
        status, first = call(collector, "/e/action", {"obs": OBS}, "a")
        assert (status, first.get("durable", True)) == (200, True)
        assert call(collector, "/e/action", {"obs": OBS}, "a") == (200, first)
        collector.kill()
        collector.restart()
        assert call(collector, "/e/action", {"obs": OBS}, "a") == (200, first)
        assert call(collector, "/e/action", {"obs": [0.0] * 4}, "a")[0] == 409
        assert collector.get("/v1/episodes/e")[1]["steps"] == 1
        assert call(collector, "/e/action", {"obs": OBS}, "b")[0] == 200
        status, answer = call(collector, "/e/action", {"obs": OBS}, "a")
        assert (status, answer["error"]["code"]) == (409, "conflict")
        assert collector.get("/v1/episodes/e")[1]["steps"] == 2
        assert call(collector, "/e/end", {}, "c")[0] == 200
        for key in ("a", "b"):
            status, answer = call(collector, "/e/action", {"obs": OBS}, key)
            assert (status, answer["error"]["code"]) == (409, "completed")


# --- the book ---------------------------------------------------------------------------------


def given(name: str, reward: float = 1.0) -> Given:
    return Given.of(name, None, wire.LogReturns(episode_id="e", reward=reward))


def test_the_book_is_the_same_from_its_state_and_from_its_rows() -> None:
    """Rows that repeat the state change nothing; the rest of the book comes from rows."""
    book, rows = KeyBook(4), list[Keyed]()
    chunks: dict[str, bytes] = {}
    for number in range(17):
        book.note(given(str(number)), None)
        rows.append(Keyed(number, "e", str(number), given(str(number)).digest, -1))
        if number % 3 == 2:
            put, delete = book.state()
            chunks = {name: blob for name, blob in (chunks | put).items() if name not in delete}
    again = KeyBook(4)
    again.restore(chunks.items())
    for event in rows[14:]:  # rows that a part still needs
        again.add(event)
    for number in range(17):
        known = [one.find(given(str(number))) for one in (book, again)]
        assert known[0] == known[1]
        assert (known[0] is not None) == (number >= 13)
    assert len(chunks) <= 3


def test_the_book_tells_other_content() -> None:
    book = KeyBook()
    book.note(given("k"), None)
    with pytest.raises(Refusal, match="other content"):
        book.find(given("k", 2.0))
    assert Given.of("k", "i", wire.End(episode_id="e")) != Given.of(
        "k", None, wire.End(episode_id="e")
    )
