"""Authorisation at a real collector: tokens, limits, TLS, hosts; no secret is written anywhere.

Also of `ingest.web.connections`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from ingest.access.key_files import create_token, revoke_token
from ingest.access.tokens import SCOPES
from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import BufferFull, CollectorUnavailable, Refusal
from ingest.server.listening import Access, ServeError, bind
from ingest.server.options import Listening
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from tests.certificates import certify
from tests.collector_process import PLAIN, CollectorProcess, declare, shard_rows
from tests.ingest.raw_http import HOST, connect, listen

OBS = [0.1, -0.2, 0.3, 0.4]
STEP = {"obs": OBS, "action": 0}
PATIENCE = 60.0  # s; never reached in a good run
LEDGER = "/v1/ledger"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def wait_until(ready: Callable[[], bool]) -> None:
    """Ask until the condition holds."""
    began = time.monotonic()
    pause = threading.Event()
    while not ready():
        assert time.monotonic() - began < PATIENCE, "it did not happen"
        pause.wait(0.02)


@dataclass
class House:
    """A collector with a token for each scope."""

    process: CollectorProcess
    root: Path
    tokens: dict[str, str]

    def status(self, method: str, path: str, token: str | None, body: Any = None) -> int:
        headers = bearer(self.tokens[token]) if token else {}
        return self.process.request(method, path, body, headers)[0]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    root = tmp_path_factory.mktemp("root")
    spec = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
    declare(root, spec=spec.to_json())
    store = WeightStore(root, "default")
    made = Policy(spec, seed=0).get_weights()
    store.publish(store.add_candidate(made, spec=spec.to_json(), metrics={}, lineage={}))
    tokens = {
        name: create_token(root, name.replace(":", "-"), [name])[1]
        for name in ("log", "act", "weights:read", "weights:publish", "erase", "admin")
    }
    tokens["both"] = create_token(root, "both", ["log", "act"])[1]
    with CollectorProcess(root) as process:
        yield House(process, root, tokens)


ROUTES = [
    ("GET", "/v1/spec", None, {*SCOPES, "both"}),
    ("GET", "/v1/policies/default/versions", None, {"weights:publish"}),
    ("POST", "/v1/policies/default/versions", {}, {"weights:publish"}),
    ("POST", "/v1/policies/default/rollback", {}, {"weights:publish"}),
    ("GET", "/", None, {*SCOPES, "both"}),
    ("POST", "/v1/erase", {"tombstones": ["a" * 32]}, {"erase"}),
    ("POST", "/v1/instances", {}, {"log", "act", "both"}),
    ("POST", "/v1/events", {"events": []}, {"log", "both"}),
    ("POST", "/v1/actions", {"actions": []}, {"act", "both"}),
    ("POST", "/v1/steps", None, {"log", "both"}),
    ("POST", "/v1/episodes", {}, {"log", "both"}),
    ("GET", "/v1/episodes/none", None, {"log", "act", "both"}),
    ("POST", "/v1/episodes/none/log_action", STEP, {"log", "both"}),
    ("POST", "/v1/episodes/none/log_returns", {"reward": 1}, {"log", "both"}),
    ("POST", "/v1/episodes/none/end", {}, {"log", "both"}),
    ("POST", "/v1/episodes/none/action", {"obs": OBS}, {"act", "both"}),
    ("POST", "/v1/rank", {"actions": []}, {"both"}),
    ("POST", "/v1/reward/none", {"reward": 1}, {"log", "both"}),
    ("POST", "/v1/activate/none", {}, {"log", "both"}),
]


@pytest.mark.parametrize(("method", "path", "body", "may"), ROUTES)
def test_each_route_asks_for_its_scope(
    house: House, method: str, path: str, body: Any, may: set[str]
) -> None:
    """401 without a token, 403 with one of another scope; an authorised request is handled as
    usual.
    """
    if path == "/":
        statuses = {
            name: requests.get(
                house.process.address, headers=bearer(token), timeout=PATIENCE
            ).status_code
            for name, token in house.tokens.items()
        }
        assert requests.get(house.process.address, timeout=PATIENCE).status_code == 401
    else:
        statuses = {name: house.status(method, path, name, body) for name in house.tokens}
        assert house.status(method, path, None, body) == 401
    assert {name for name, status in statuses.items() if status != 403} == may
    assert 401 not in statuses.values()


def test_weights_are_for_those_who_may_read_them(house: House) -> None:
    path = house.process.address + "/v1/policies/default/weights"
    statuses = {
        name: requests.get(path, headers=bearer(token), timeout=PATIENCE).status_code
        for name, token in house.tokens.items()
    }
    assert {name for name, status in statuses.items() if status == 200} == {"weights:read"}
    assert set(statuses.values()) == {200, 403}


def test_what_operates_the_collector_needs_no_token(house: House) -> None:
    """Liveness and readiness are open, and disclose nothing else to anonymous callers."""
    assert house.process.get("/healthz") == (200, {"status": "ok"})
    assert house.process.get("/readyz") == (200, {"ready": True})
    status, reply = house.process.request("GET", "/readyz", None, bearer(house.tokens["log"]))
    assert (status, reply["ready"]) == (200, True)
    assert "steps" in reply


def test_a_probe_with_a_useless_token_hears_that_the_collector_works(house: House) -> None:
    """On a route without authorisation a useless token counts as none, so that no probe restarts a
    collector for it."""
    forged = bearer(house.tokens["log"] + "x")["authorization"]
    for text in (forged, "Bearer nonsense", "Basic YTpi"):
        headers = {"authorization": text}
        assert house.process.request("GET", "/healthz", None, headers) == (200, {"status": "ok"})
        assert house.process.request("GET", "/readyz", None, headers) == (200, {"ready": True})
        assert house.process.request("GET", "/v1/spec", None, headers)[0] == 401


def test_a_refused_caller_hears_how_to_come_in(house: House) -> None:
    """401 names the scheme in WWW-Authenticate (RFC 6750)."""
    answer = requests.get(house.process.address + "/v1/spec", timeout=PATIENCE)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"]["code"] == "unauthorized"


def test_a_stranger_does_not_hear_which_routes_there_are(house: House) -> None:
    """Without a token, an unknown path or method is 401 like any other; with one, it is named."""
    for method, path, expected in (("GET", "/v1/nothing", 404), ("DELETE", "/v1/spec", 405)):
        assert house.status(method, path, None) == 401
        assert {house.status(method, path, name) for name in house.tokens} == {expected}


def test_a_decision_needs_the_right_to_act(house: House) -> None:
    """A token that only logs cannot present its choices as the policy's; logging still works."""
    decision = {"type": "decision", "episode_id": "d", "action_logp": -0.7, "policy_version": 1}
    events = [{"type": "start", "episode_id": "d"}, {**decision, **STEP}]
    assert house.status("POST", "/v1/events", "log", {"events": events}) == 403
    assert house.status("GET", "/v1/episodes/d", "log") == 404
    assert house.status("POST", "/v1/events", "both", {"events": events}) == 200
    asked = {"events": events[:1], "actions": []}
    assert house.status("POST", "/v1/actions", "act", asked) == 403


def test_a_client_with_its_scopes_logs_and_acts(house: House) -> None:
    """Remote mode needs log and act; a client that may only log gets 403 in the call."""
    address = house.process.address
    with PolicyClient(address, "remote", token=house.tokens["both"]) as client:
        episode = client.start_episode()
        assert client.get_action(episode, OBS) in (0, 1)
        client.log_returns(episode, 1.0)
        client.end_episode(episode)
    with PolicyClient(address, "remote", token=house.tokens["log"]) as client:
        episode = client.start_episode()
        with pytest.raises(Refusal, match="scope act") as refused:
            client.get_action(episode, OBS)
        assert refused.value.status == 403
        client.log_action(episode, OBS, 1)
        client.end_episode(episode)
        client.flush(PATIENCE)
        assert client.stats.refused == {}


@pytest.mark.parametrize("token", [None, "hr_00000000_x", "nonsense"])
def test_a_client_that_is_not_let_in_hears_it_in_the_call(house: House, token: str | None) -> None:
    with (
        PolicyClient(house.process.address, token=token) as client,
        pytest.raises(Refusal) as refused,
    ):
        client.connect()
    assert refused.value.status == 401


# --- revocation, expiry, rotation ----------------------------------------------------------------


def test_a_revoked_token_is_refused_soon(house: House) -> None:
    """A running collector refuses a token that was revoked or has expired; other tokens stay
    valid."""
    made, text = create_token(house.root, "short", ["log"])
    _, brief = create_token(house.root, "brief", ["log"], lives=2)
    house.tokens["short"], house.tokens["brief"] = text, brief
    wait_until(lambda: house.status("GET", "/v1/spec", "short") == 200)
    wait_until(lambda: house.status("GET", "/v1/spec", "brief") == 401)
    revoke_token(house.root, made.id)
    wait_until(lambda: house.status("GET", "/v1/spec", "short") == 401)
    assert house.status("GET", "/v1/spec", "log") == 200
    assert (
        house.status("GET", "/readyz", "short") == house.status("GET", "/healthz", "brief") == 200
    )
    del house.tokens["short"], house.tokens["brief"]


def test_a_revocation_reaches_what_was_let_in_before(tmp_path: Path) -> None:
    """Once the revocation is seen, no slow body, long poll or held action is answered.

    Each leaves an audit line that names the token.
    """
    spec = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
    declare(tmp_path, spec=spec.to_json(), steps_per_version=1)
    store = WeightStore(tmp_path, "default")

    def publish(seed: int) -> None:
        made = Policy(spec, seed=seed).get_weights()
        store.publish(store.add_candidate(made, spec=spec.to_json(), metrics={}, lineage={}))

    publish(0)
    made, text = create_token(tmp_path, "short", ["log", "act", "weights:read"])
    found: dict[str, int] = {}
    log = tmp_path / "stderr"
    with CollectorProcess(tmp_path, log=log) as process, contextlib.ExitStack() as stack:

        def ask(what: str, path: str, body: Any = None, **headers: str) -> requests.Response:
            method, address = "GET" if body is None else "POST", process.address + path
            answer = requests.request(
                method, address, json=body, headers={**bearer(text), **headers}, timeout=60
            )
            found[what] = answer.status_code
            return answer

        def ask_aside(*asked: Any, **headers: str) -> None:
            thread = threading.Thread(target=ask, args=asked, kwargs=headers)
            thread.start()
            stack.callback(thread.join)

        events = [{"type": "start", "episode_id": "e"}, {"type": "start", "episode_id": "f"}]
        actions = [{"episode_id": "e", "obs": OBS}]
        ask("", "/v1/actions", {"events": events, "actions": actions})
        ask("", "/v1/episodes/e/end", {})
        held = {"actions": [{"episode_id": "f", "obs": OBS}], "wait": 30.0}
        ask_aside("action", "/v1/actions", held)
        path = "/v1/policies/default/weights"
        known = ask("", path).headers["etag"]
        ask_aside("poll", path, **{"if-none-match": known, "prefer": "wait=30"})
        slow = stack.enter_context(connect(process.port, 30.0))
        head = (
            f"POST /v1/episodes HTTP/1.1\r\nAuthorization: Bearer {text}\r\nContent-Length: 22\r\n"
        )
        slow.sendall(head.encode() + HOST + b"\r\n" + b'{"epi')
        waiting = "headrace_holds_total 1"
        wait_until(lambda: waiting in ask("", "/metrics").text)
        revoke_token(tmp_path, made.id)
        wait_until(lambda: ask("", "/v1/spec").status_code == 401)
        assert set(found) == {""}
        slow.sendall(b'sode_id": "slow"}')
        assert listen(slow).statuses == [401]
        publish(1)
    assert (found["action"], found["poll"]) == (401, 401)
    lines = [line for line in refused_lines(log) if line["path"] != "/v1/spec"]
    assert {line["path"] for line in lines} == {"/v1/actions", path, "/v1/episodes"}
    assert {(line["code"], line["token"]) for line in lines} == {("unauthorized", made.id)}


def refused_lines(log: Path) -> list[dict[str, Any]]:
    """The audit lines of refused authorisation in a collector's log."""
    found = re.findall(r'\{"audit":"refused".*\}', log.read_text())
    return [json.loads(line) for line in found]


def test_an_audit_line_names_the_token_that_may_not(tmp_path: Path) -> None:
    """The audit line of a 403 has the token's id, also where the body needs another scope. With a
    wrong secret it has none."""
    declare(tmp_path)
    made, text = create_token(tmp_path, "actor", ["act"])
    events = {"events": [{"type": "start", "episode_id": "e"}], "actions": []}
    log = tmp_path / "stderr"
    with CollectorProcess(tmp_path, log=log) as process:
        for path, body, token in (
            ("/v1/events", {"events": []}, text),
            ("/v1/actions", events, text),
            (LEDGER, None, text),
            (LEDGER, None, text[:-4] + "AAAA"),
        ):
            method = "GET" if body is None else "POST"
            status, answer = process.request(method, path, body, bearer(token))
            assert status == (403 if token == text else 401)
            message = answer["error"]["message"]
            assert "scope admin; this caller has act" in message or (path, token) != (LEDGER, text)
        process.stop()
    entries = [(line["path"], line["code"], line["token"]) for line in refused_lines(log)]
    assert entries == [
        ("/v1/events", "forbidden", made.id),
        ("/v1/actions", "forbidden", made.id),
        (LEDGER, "forbidden", made.id),
        (LEDGER, "unauthorized", None),
    ]


def test_nothing_is_lost_while_a_token_is_renewed(tmp_path: Path) -> None:
    """Events logged meanwhile wait, break no episode, and arrive once with the next token."""
    declare(tmp_path)
    current = [create_token(tmp_path, "one", ["log"])[1]]
    with CollectorProcess(tmp_path) as process:
        client = PolicyClient(process.address, token=lambda: current[0], timeout=20.0)
        episode = client.start_episode()
        client.log_action(episode, OBS, 0)
        client.flush(PATIENCE)
        revoke_token(tmp_path, "one")
        refused = {"authorization": f"Bearer {current[0]}"}
        wait_until(lambda: process.request("GET", "/v1/spec", None, refused)[0] == 401)
        for _ in range(50):
            client.log_action(episode, OBS, 1)
        with pytest.raises(Refusal, match="revoked") as met:
            client.flush(PATIENCE)
        assert met.value.status == 401
        client.log_action(episode, OBS, 0)  # the episode is unchanged
        current[0] = create_token(tmp_path, "two", ["log"])[1]
        client.end_episode(episode)

        def delivered() -> bool:
            with contextlib.suppress(Refusal):
                client.flush(PATIENCE)
                return True
            return False

        wait_until(delivered)
        assert client.stats.refused == {}
        client.close()
        process.settle(52, **bearer(current[0]))
        assert process.stop() == 0
    rows = shard_rows(tmp_path)
    assert [row["actions"] for row in rows] == [0, *[1] * 50, 0]
    assert rows[-1]["ended"] == "terminated"


def test_a_full_queue_says_that_the_token_is_refused(tmp_path: Path) -> None:
    """Both modes name the cause in the call: a full queue, and an action that waits for events."""
    declare(tmp_path)
    _, text = create_token(tmp_path, "web", ["log", "act"])
    with CollectorProcess(tmp_path) as process:
        client = PolicyClient(
            process.address,
            "remote",
            token=text,
            max_pending=5,
            on_full="raise",
            timeout=2 * PATIENCE,
        )
        episode = client.start_episode()
        client.log_action(episode, OBS, 0)
        client.flush(PATIENCE)
        revoke_token(tmp_path, "web")
        wait_until(lambda: process.request("GET", "/v1/spec", None, bearer(text))[0] == 401)

        def fill() -> None:
            for _ in range(6):
                client.log_action(episode, OBS, 0)
                with contextlib.suppress(Refusal):
                    client.flush(PATIENCE)

        with pytest.raises(BufferFull, match="is revoked"):
            fill()
        began = time.monotonic()
        with pytest.raises(Refusal, match="is revoked"):
            client.get_action(episode, OBS)
        assert time.monotonic() - began < PATIENCE
        with pytest.raises(Refusal, match="is revoked"):
            client.close(0.1)


# --- limits --------------------------------------------------------------------------------------


def test_too_many_open_episodes_wait_their_turn(tmp_path: Path) -> None:
    """429 busy beyond the token's own quota, also after a kill; other tokens are not affected."""
    declare(tmp_path)
    few = bearer(create_token(tmp_path, "few", ["log"], open_episodes=2)[1])
    free = bearer(create_token(tmp_path, "free", ["log"])[1])
    with CollectorProcess(tmp_path) as process:
        for name in ("a", "b"):
            assert process.post("/v1/episodes", {"episode_id": name}, **few)[0] == 201
        process.kill()
        process.restart()
        status, answer = process.post("/v1/episodes", {"episode_id": "c"}, **few)
        assert (status, answer["error"]["code"]) == (429, "busy")
        assert answer["error"]["retry_after"] > 0
        assert process.post("/v1/episodes", {"episode_id": "d"}, **free)[0] == 201
        assert process.post("/v1/episodes/a/end", {}, **few)[0] == 200
        assert process.post("/v1/episodes", {"episode_id": "c"}, **few)[0] == 201


def test_a_client_under_a_quota_delivers_all_the_same(tmp_path: Path) -> None:
    """Starts beyond the quota are resent once others have ended: nothing is lost or doubled."""
    declare(tmp_path)
    token = create_token(tmp_path, "few", ["log"], open_episodes=2, rate=2000)[1]
    with CollectorProcess(tmp_path) as process:
        with PolicyClient(process.address, token=token) as client:
            episodes = [client.start_episode() for _ in range(5)]
            for t in range(3):
                for episode in episodes:
                    client.log_action(episode, OBS, t % 2)
            wait_until(lambda: client.stats.resent > 0)  # a start beyond the quota was answered
            with pytest.raises(TimeoutError, match=r"last error: .*open episodes"):
                client.flush(1)
            for episode in episodes:
                client.end_episode(episode)
            client.flush(30)
            assert client.stats.refused == {}
        process.settle(15, **bearer(token))
        process.stop()
    rows = shard_rows(tmp_path)
    counts = {name: [r["t"] for r in rows if r["eps_id"] == name] for name in episodes}
    assert counts == {name: [0, 1, 2] for name in episodes}


def test_too_fast_a_token_is_told_when_to_come_again(tmp_path: Path) -> None:
    """A token above its rate gets 429 with Retry-After; another token is not slowed down."""
    declare(tmp_path)
    slow = bearer(create_token(tmp_path, "slow", ["log"], rate=2)[1])
    free = bearer(create_token(tmp_path, "free", ["log"])[1])
    batch = {"events": [{"type": "start", "episode_id": f"e{n}"} for n in range(9)]}
    with CollectorProcess(tmp_path) as process:
        assert process.post("/v1/events", batch, **slow)[0] == 200
        answer = requests.get(process.address + "/v1/spec", headers=slow, timeout=PATIENCE)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        assert process.get("/healthz")[0] == 200
        assert process.request("GET", "/v1/spec", None, free)[0] == 200


# --- hosts and origins ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "rebound.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_a_page_of_another_origin_reaches_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    open_collector: CollectorProcess,
    headers: dict[str, str],
    status: int,
) -> None:
    """On a root without tokens, a rebound host name and a foreign origin are refused on every
    route."""
    for path in ("/v1/spec", "/healthz"):
        answer = requests.get(open_collector.address + path, headers=headers, timeout=PATIENCE)
        assert answer.status_code == status
    sent = {**headers, "content-type": "application/json"}
    for path, expected in (("/v1/episodes", 201), ("/v1/spec", 405), ("/v1/nothing", 404)):
        url = open_collector.address + path
        answer = requests.post(url, data="{}", headers=sent, timeout=PATIENCE)
        assert answer.status_code == (expected if status == 200 else 403)


@pytest.fixture(scope="module")
def open_collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("open")
    declare(root)
    with CollectorProcess(root) as process:
        yield process


def test_two_hosts_in_one_request_are_refused(open_collector: CollectorProcess) -> None:
    """A proxy in front must have checked the same host as the collector."""
    with socket.create_connection(("127.0.0.1", open_collector.port), 10) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n")
        assert raw.recv(12).endswith(b" 400")


# --- TLS -----------------------------------------------------------------------------------------


def test_a_client_speaks_tls_and_trusts_only_its_authority(tmp_path: Path) -> None:
    """Set by `ca` or by a session; another authority's client raises at once and sends nothing."""
    declare(tmp_path)
    mine, other = certify(tmp_path / "mine"), certify(tmp_path / "other")
    token = create_token(tmp_path, "web", ["log"])[1]
    with CollectorProcess(tmp_path, options=mine.options, ca=mine.ca) as process:
        assert process.address.startswith("https://")
        with PolicyClient(process.address, token=token, ca=mine.ca) as client:
            client.log_step(OBS, 1, 1.0)
            client.flush(PATIENCE)
        with requests.Session() as session:
            session.verify = str(mine.ca)
            with PolicyClient(process.address, token=token, session=session) as client:
                client.log_step(OBS, 1, 2.0)
        with (
            PolicyClient(process.address, token=token, ca=other.ca) as client,
            pytest.raises(
                CollectorUnavailable, match=r"certificate.*; the next request is"
            ) as refused,
        ):
            client.connect()
        assert not refused.value.maybe_applied
        with pytest.raises(CollectorUnavailable):
            PolicyClient(process.address, token=token, timeout=1.0).connect()
        process.settle(2, **bearer(token))
        process.stop()
    assert [row["rewards"] for row in shard_rows(tmp_path)] == [1.0, 2.0]


def test_a_renewed_certificate_needs_no_restart(tmp_path: Path) -> None:
    """New connections use the renewed certificate; one that is unreadable or lacks its key changes
    nothing."""
    declare(tmp_path)
    mine = certify(tmp_path / "mine")
    old = ssl.create_default_context(cafile=str(mine.ca))
    with CollectorProcess(tmp_path, options=mine.options, log=tmp_path / "log") as process:

        def trusted(context: ssl.SSLContext) -> bool:
            try:
                with (
                    socket.create_connection(("127.0.0.1", process.port), 10) as raw,
                    context.wrap_socket(raw, server_hostname="localhost"),
                ):
                    return True
            except ssl.SSLCertVerificationError:
                return False

        assert trusted(old)
        mine.cert.write_bytes(b"no certificate")
        wait_until(lambda: "certificate cannot be reloaded" in (tmp_path / "log").read_text())
        assert trusted(old)
        other = certify(tmp_path / "other")
        mine.cert.write_bytes(other.cert.read_bytes())
        wait_until(lambda: "MISMATCH" in (tmp_path / "log").read_text())
        assert trusted(old)
        mine.key.write_bytes(other.key.read_bytes())
        wait_until(lambda: trusted(ssl.create_default_context(cafile=str(other.ca))))
        certify(tmp_path / "mine")
        new = ssl.create_default_context(cafile=str(mine.ca))
        wait_until(lambda: trusted(new))
        assert not trusted(old)


# --- where to listen -----------------------------------------------------------------------------


def test_another_address_needs_a_token_and_tls_and_says_how(tmp_path: Path) -> None:
    """With no token, a revoked one or a token but no TLS, the start is refused and the error names
    the option.
    """
    everywhere = Listening(host="0.0.0.0", port=0)
    for name in (None, "gone"):
        if name:
            create_token(tmp_path, name, ["log"])
            revoke_token(tmp_path, name)
        with pytest.raises(ServeError, match="headrace token create"):
            Access(tmp_path, everywhere)
    create_token(tmp_path, "web", ["log"])
    with pytest.raises(ServeError, match="--tls-cert and --tls-key, or --insecure-no-tls"):
        Access(tmp_path, everywhere)
    assert Access(tmp_path, Listening(host="0.0.0.0", port=0, insecure=True)).tls is None
    made = certify(tmp_path / "mine")
    where = Listening(host="0.0.0.0", port=0, tls_cert=str(made.cert), tls_key=made.key)
    assert Access(tmp_path, where).tls is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.9"])
def test_loopback_needs_nothing(tmp_path: Path, host: str) -> None:
    where = Listening(host=host, port=0)
    assert not Access(tmp_path, where).book.required
    bind(where).close()


def test_a_collector_on_ipv6_is_called_by_its_address(tmp_path: Path) -> None:
    """`[::1]` in the address that it prints, in the client and in the Host header."""
    declare(tmp_path)
    with CollectorProcess(tmp_path, options=["--host", "::1"]) as process:
        assert process.address.startswith("http://[::1]:")
        with PolicyClient(process.address) as client:
            client.log_step(OBS, 1, 1.0)
            client.flush(PATIENCE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host", "0.0.0.0"], "headrace token create"),
        (["--host", "no..such.host"], "expected a name or an address"),
        (["--tls-cert", "/no/such/file"], "TLS: expected a PEM chain"),
        (["--tls-key", "/no/such/file"], "expected --tls-cert with"),
        (["--allow-host", "a.example.com:8642"], "without scheme and port"),
        (["--allow-host", "https://a.example.com"], "without scheme and port"),
    ],
)
def test_a_collector_that_cannot_start_says_why(
    tmp_path: Path, options: list[str], text: str
) -> None:
    """Exit status 2 and one line: no traceback, and nothing was bound."""
    declare(tmp_path)
    command = [sys.executable, "-m", PLAIN, "collect", "--root", str(tmp_path), "--port", "0"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_damaged_token_file_stops_the_start(tmp_path: Path) -> None:
    """A damaged token file authorises nobody; a running collector keeps the tokens that it had
    read."""
    create_token(tmp_path, "web", ["log"])
    access = Access(tmp_path, Listening(port=0))
    (tmp_path / "keys" / "tokens.json").write_text("{")
    access.look()
    assert len(access.book.live(time.time())) == 1
    with pytest.raises(ServeError, match="tokens cannot be read"):
        Access(tmp_path, Listening(port=0))


# --- secrets -------------------------------------------------------------------------------------


def test_no_secret_is_ever_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """After good and bad tokens, refusals, errors and a drain, no file, log or error holds a
    secret.

    The audit lines record each event and its token's id.
    """
    root = tmp_path / "root"
    declare(root)
    made, good = create_token(root, "web", ["log"])
    bad = good[:-4] + "AAAA"
    texts: list[str] = []
    caplog.set_level(logging.DEBUG, "headrace")
    caplog.set_level(logging.WARNING, "urllib3")
    log = tmp_path / "stderr"
    with CollectorProcess(root, log=log, env={"HEADRACE_TOKEN": good}) as process:
        with PolicyClient(process.address, token=good) as client:
            texts += [repr(client), repr(client._transport), repr(client.stats)]
            client.connect()
            client.log_step(OBS, 1, 1.0)
            with pytest.raises(ValueError, match="obs") as refused:
                client.log_step([1], 1, 1.0)
            texts.append(repr(refused.value))
        with PolicyClient(process.address, token=bad) as client:
            with pytest.raises(Refusal) as refused:
                client.connect()
            texts.append(repr(refused.value))
        for path in ("/v1/spec", f"/v1/policies/{good}x/weights", "/v1/episodes/x"):
            for header in (f"Bearer {bad}", f"Basic {good}", good):
                answer = process.request("GET", path, None, {"authorization": header})
                texts.append(str(answer).replace(f"{good}x", ""))
        revoke_token(root, "web")
        wait_until(lambda: "token_revoked" in log.read_text())
        process.stop()
        unreachable = PolicyClient(process.address, token=good, timeout=0.2)
        with pytest.raises(CollectorUnavailable) as away:
            unreachable.connect()
        texts.append(repr(away.value))
    texts += [*capfd.readouterr(), caplog.text]
    everything = "\n".join(texts).encode()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            everything += path.read_bytes()
    for token in (good, bad):
        assert token.split("_", 2)[2].encode() not in everything
    log_text = log.read_text()
    assert f'"audit":"token_revoked","id":"{made.id}","name":"web"' in log_text
    assert '"audit":"refused","code":"unauthorized"' in log_text
    assert os.environ.get("HEADRACE_TOKEN") is None
