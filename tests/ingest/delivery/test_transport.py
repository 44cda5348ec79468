"""One HTTP request: the meaning of its outcome, and the wait before the next attempt."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import requests
import trustme
from hypothesis import given
from hypothesis import strategies as st

from ingest.client.policy_client import PolicyClient
from ingest.delivery import transport as transport_module
from ingest.delivery.transport import (
    UNAVAILABLE,
    Answer,
    Delivery,
    Transport,
    refusal_from_json,
    refusal_of,
)
from ingest.protocol import messages as wire
from ingest.protocol.errors import STATUS, CollectorUnavailable, Refusal
from storage.system.backoff import Backoff
from tests.certificates import certify
from tests.ingest import scripted_collector
from tests.ingest.scripted_collector import (
    Fault,
    Gate,
    ScriptedCollector,
    answering,
    cut_after,
    cut_before,
)

REGISTER = ("POST", "/v1/instances", wire.encode(wire.Register(), wire.MSGPACK))


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


@pytest.fixture(params=["urllib3", "requests"])
def transport(collector: ScriptedCollector, request: pytest.FixtureRequest) -> Iterator[Transport]:
    with requests.Session() as session:
        given_session = session if request.param == "requests" else None
        made = Transport(collector.address, session=given_session, token="t", timeout=60.0)
        yield made
        made.close()


def test_a_request_is_answered(collector: ScriptedCollector, transport: Transport) -> None:
    """The message is decoded; the token and the accepted format are sent."""
    answer = transport.attempt(*REGISTER)
    assert answer.decode(wire.Registered).instance == "instance-1"
    ((_, headers, _),) = collector.requests
    assert headers["authorization"] == "Bearer t"
    assert headers["accept"] == wire.MSGPACK


@pytest.mark.parametrize("status", sorted(UNAVAILABLE))
def test_a_busy_collector_is_unavailable(
    collector: ScriptedCollector, transport: Transport, status: int
) -> None:
    """The outcome is open, so the request may be repeated. The collector's own answers also state
    that nothing was applied; a gateway's do not."""
    collector.faults.append(answering(status, "busy", Retry_After="2.5"))
    with pytest.raises(CollectorUnavailable, match="scripted busy") as caught:
        transport.attempt(*REGISTER)
    assert caught.value.retry_after == 2.5
    assert caught.value.maybe_applied == (status not in {425, 429, 503, 507})


@pytest.mark.parametrize(("wait", "meant"), [(0.2, 0.2), (None, 1.0), ("soon", 1.0), (-1, 1.0)])
def test_the_collectors_own_wait_is_more_exact_than_the_header(
    collector: ScriptedCollector, transport: Transport, wait: Any, meant: float
) -> None:
    """The header has whole seconds only; a value that is not a number of seconds is ignored."""
    error = {"code": "busy", "message": "", "retry_after": wait}
    body = msgspec.json.encode({"error": error})
    answer = scripted_collector.Answer(429, body, wire.JSON, {"Retry_After": "1"})
    collector.faults.append(lambda serve: answer)
    with pytest.raises(CollectorUnavailable) as caught:
        transport.attempt(*REGISTER)
    assert caught.value.retry_after == meant


TRY_AGAIN = {"busy", "draining", "disk_full", "too_slow"}


@pytest.mark.parametrize("code", sorted(set(STATUS) - TRY_AGAIN))
def test_a_judgement_is_a_refusal(
    collector: ScriptedCollector, transport: Transport, code: str
) -> None:
    """Every other code of the protocol is an answer, including `no_version`."""
    collector.faults.append(answering(STATUS[code], code))
    with pytest.raises(Refusal, match=f"scripted {code}") as caught:
        transport.attempt(*REGISTER)
    assert caught.value.code == code


@pytest.mark.parametrize("fault", [cut_before, cut_after])
def test_a_cut_connection_may_have_had_its_effect(
    collector: ScriptedCollector, transport: Transport, fault: Any
) -> None:
    """A lost request and a lost answer look the same to the client."""
    collector.faults.append(fault)
    with pytest.raises(CollectorUnavailable) as caught:
        transport.attempt(*REGISTER)
    assert caught.value.maybe_applied


@pytest.mark.parametrize("library", ["urllib3", "requests"])
def test_a_refused_connection_had_no_effect(library: str) -> None:
    """No byte left this machine."""
    with socket.socket() as taken, requests.Session() as session:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        transport = Transport(address, session=session if library == "requests" else None)
        with pytest.raises(CollectorUnavailable, match=address) as caught:
            transport.attempt(*REGISTER)
        transport.close()
    assert not caught.value.maybe_applied


def test_a_silent_collector_times_out(collector: ScriptedCollector, transport: Transport) -> None:
    """The time-out of the attempt applies."""
    gate = Gate()
    collector.faults.append(gate)
    with pytest.raises(CollectorUnavailable) as caught:
        transport.attempt(*REGISTER, timeout=0.1)
    gate.opened.set()
    assert caught.value.maybe_applied


def test_an_answer_that_is_no_message_is_no_answer() -> None:
    """A captive portal's 200 with an HTML page acknowledges nothing."""
    for answer in (
        Answer(200, {"content-type": "text/html"}, b"<html>"),
        Answer(200, {"content-type": wire.JSON}, b'{"x": 1}'),
        Answer(200, {}, b""),
    ):
        with pytest.raises(CollectorUnavailable, match="expected a Registered of protocol v1"):
            answer.decode(wire.Registered)


def test_a_delivery_repeats_identical_bytes(
    collector: ScriptedCollector, transport: Transport
) -> None:
    """It repeats them until it is answered, and remembers whether an attempt may have taken
    effect.
    """
    collector.faults.extend([answering(503, "draining"), cut_after])
    delivery = Delivery(transport, *REGISTER, backoff=Backoff(0.001, 5.0))
    with pytest.raises(CollectorUnavailable):
        delivery.attempt(wire.Registered)
    assert not delivery.maybe_applied
    delivery.run(wire.Registered)
    assert delivery.maybe_applied
    assert len(set(collector.bodies("/v1/instances"))) == 1


def test_a_delivery_gives_up_in_time(
    collector: ScriptedCollector, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if the collector asks for a longer pause than the time left."""
    now, waits = 0.0, []

    def take_100_seconds() -> Fault:
        nonlocal now
        now += 100.0
        return cut_before

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 10  # as if the transport was closed

    monkeypatch.setattr(transport_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(transport.closing, "wait", wait)
    collector.chance = lambda: answering(429, "busy", Retry_After="1000")
    with pytest.raises(CollectorUnavailable, match="busy"):
        Delivery(transport, *REGISTER).run(wire.Registered, 999.0)
    assert (len(collector.requests), waits) == (1, [])
    collector.chance = take_100_seconds
    with pytest.raises(CollectorUnavailable):
        Delivery(transport, *REGISTER).run(wire.Registered, 500.0)
    assert (len(collector.requests), len(waits)) == (1 + 5, 4)


def test_closing_ends_a_wait(collector: ScriptedCollector, transport: Transport) -> None:
    """A close does not wait for a back-off."""
    collector.chance = lambda: answering(503, "draining", Retry_After="30")
    threading.Timer(0.1, transport.closing.set).start()
    with pytest.raises(CollectorUnavailable):
        Delivery(transport, *REGISTER).run(wire.Registered, 60.0)
    assert len(collector.requests) == 1  # else another after 30 s


def test_retry_after_may_be_a_date(collector: ScriptedCollector, transport: Transport) -> None:
    """Seconds or an HTTP date; anything else is ignored."""
    for text, low, high in (
        (formatdate(time.time() + 2_000, usegmt=True), 1_900.0, 2_001.0),
        (formatdate(time.time() - 2_000, usegmt=True), 0.0, 0.0),
    ):
        collector.faults.append(answering(503, "draining", Retry_After=text))
        with pytest.raises(CollectorUnavailable) as caught:
            transport.attempt(*REGISTER)
        assert low <= (caught.value.retry_after or 0.0) <= high
    collector.faults.append(answering(503, "draining", Retry_After="soon"))
    with pytest.raises(CollectorUnavailable) as caught:
        transport.attempt(*REGISTER)
    assert caught.value.retry_after is None


@pytest.mark.parametrize(
    ("given_address", "meant"),
    [
        ("localhost:9900", "http://localhost:9900"),
        ("http://localhost:9900/", "http://localhost:9900"),
        ("https://x.example/team/headrace/", "https://x.example/team/headrace"),
        ("http://[::1]:9900", "http://[::1]:9900"),
    ],
)
def test_an_address_is_read(given_address: str, meant: str) -> None:
    """Scheme and trailing slash are optional; a path is kept."""
    assert Transport(given_address).address == meant


@pytest.mark.parametrize(
    "address", ["", "ftp://x", "http://", "http://h:99999", "http://a b", "http://[::1", 5, None]
)
def test_a_bad_address_is_refused(address: Any) -> None:
    """The error says what was expected."""
    with pytest.raises(ValueError, match="address: expected http://HOST"):
        Transport(address)


def test_a_token_is_a_string_or_a_function() -> None:
    """A wrong type raises when the client is created, not at each request."""
    with pytest.raises(ValueError, match="token: expected a string or a function, got <class 'int"):
        Transport("http://h", token=5)  # type: ignore[arg-type]  # that is the point


def test_whatever_a_session_raises_is_tried_again(collector: ScriptedCollector) -> None:
    """A user's session may have its own adapters: none of their errors ends the sending thread."""
    errors: list[Exception] = [KeyError("odd"), RuntimeError("adapter"), UnicodeError("label")]

    class Odd(requests.Session):
        def request(self, *given: Any, **options: Any) -> Any:
            if errors:
                raise errors.pop()
            return super().request(*given, **options)

    with Odd() as session, PolicyClient(collector.address, session=session) as client:
        client.log_step([0.0, 0.0], 1, 1.0)
        client.flush(60)
        assert client.stats.retries == 3
    assert len(collector.episodes) == 1


@contextlib.contextmanager
def one_handshake(context: ssl.SSLContext) -> Iterator[str]:
    """Host and port of a server that attempts the TLS handshake with one client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def shake_hands() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=shake_hands)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("fault", ["expired", "not yet valid", "issuer"])
def test_only_an_unknown_authority_is_asked_for(tmp_path: Path, fault: str) -> None:
    """`ca` does not help against an expired certificate of a known authority."""
    authority, ca = trustme.CA(), tmp_path / "ca.pem"
    (trustme.CA() if fault == "issuer" else authority).cert_pem.write_to_path(ca)
    now, day = datetime.now(UTC), timedelta(days=1)
    begin, end = (now + day, now + 2 * day) if fault == "not yet valid" else (now - 2 * day, None)
    end = now - day if fault == "expired" else end
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", not_before=begin, not_after=end).configure_cert(context)
    with one_handshake(context) as place:
        client = Transport(f"https://{place}", ca=ca)
        with pytest.raises(CollectorUnavailable, match=f"not trusted: .*{fault}") as caught:
            client.attempt(*REGISTER)
        client.close()
    assert ("--ca" in str(caught.value)) == (fault == "issuer")


@pytest.mark.parametrize("library", ["urllib3", "requests"])
def test_an_address_of_the_other_scheme_is_named(
    collector: ScriptedCollector, tmp_path: Path, library: str
) -> None:
    """This covers https to an http port and the reverse, and only before a first answer."""
    made = certify(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.cert, made.key)
    with requests.Session() as session:
        given_session = session if library == "requests" else None
        with one_handshake(context) as place:
            plain = Transport(f"http://{place}", session=given_session)
            with pytest.raises(CollectorUnavailable, match="TLS, its address is https://127"):
                plain.attempt(*REGISTER)
        secret = Transport(collector.address.replace("http", "https"), session=given_session)
        hint = rf"^{secret.address}: the server seems to speak plain http: try http://127\S+ \("
        with pytest.raises(CollectorUnavailable, match=hint):
            secret.attempt(*REGISTER)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            port = silent.getsockname()[1]
            gone = Transport(f"http://127.0.0.1:{port}", session=given_session)
            with pytest.raises(
                CollectorUnavailable, match=r"\d: no collector is listening there \("
            ):
                gone.attempt(*REGISTER)
        known = Transport(collector.address, session=given_session)
        known.attempt(*REGISTER)
        collector.faults.append(cut_before)
        with pytest.raises(CollectorUnavailable) as caught:
            known.attempt(*REGISTER)
        assert "https" not in str(caught.value)
        for one in (plain, secret, gone, known):
            one.close()


def test_a_path_in_the_address_is_kept(collector: ScriptedCollector) -> None:
    """A collector may be behind a proxy's path."""
    transport = Transport(f"{collector.address}/team/")
    with pytest.raises(Refusal):
        transport.attempt("GET", "/v1/spec")
    transport.close()
    assert collector.requests[0][0] == "/team/v1/spec"


@given(st.integers(400, 599), st.binary(max_size=60))
def test_any_error_body_becomes_a_refusal(status: int, body: bytes) -> None:
    """A proxy's page, truncated JSON or an empty body never raises another exception."""
    assert refusal_of(status, body, "").code in STATUS


def test_a_page_of_another_server_is_not_shown() -> None:
    """The refusal names the status and suggests checking the address."""
    page = b"<!DOCTYPE HTML><html><title>Error response</title></html>"
    assert str(refusal_of(501, page, "http://x")).endswith(
        "not a Headrace collector's answer: is http://x the right address?"
    )
    assert "HTTP 501" in str(refusal_of(501, page, "http://x"))


def test_an_error_of_a_later_protocol_keeps_its_text() -> None:
    """An unknown code maps to one with the same status; its fields are kept."""
    body = b'{"error": {"code": "novel", "message": "m", "episode_id": "e", "expected_seq": 4}}'
    refusal = refusal_of(422, body, "")
    assert (refusal.code, refusal.message) == ("invalid", "novel: m")
    assert (refusal.episode_id, refusal.expected_seq) == ("e", 4)
    for path, own in (("$.x", "$.x"), ("$.events[12].obs", "obs"), ("$.events[0]", None)):
        refusal = refusal_from_json({"code": "gap", "message": "m", "path": path})
        assert refusal.path == own, "the caller knows no batch"
