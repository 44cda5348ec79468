"""Connections that died while the machine slept, with no notice to either side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from ingest.delivery.transport import Transport
from ingest.protocol.errors import CollectorUnavailable
from tests.closing import Closing
from tests.ingest.scripted_collector import ScriptedCollector


class Router(Closing):
    """Forwards connections to a collector until it forgets them: they then stay open and silent."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._target = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._made: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        self._forgotten |= set(self._made)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.accepted += 1
            far = socket.create_connection(self._target)
            self._made += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if source not in self._forgotten:
                    sink.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for one in (self._listening, *self._made):
            one.close()


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def router() -> Iterator[Router]:
    with ScriptedCollector() as collector, Router(collector.address) as router:
        yield router


@pytest.mark.parametrize("slept", [3600.0, -3600.0])
def test_a_connection_that_died_in_a_sleep_is_not_used(router: Router, slept: float) -> None:
    """The first request after a sleep uses a new connection, also when the clock was set back."""
    clock = Clock()
    transport = Transport(router.address, timeout=60.0, clock=clock)
    for _ in range(2):
        transport.attempt("GET", "/v1/spec")
    assert router.accepted == 1
    router.forget()
    clock.now += slept
    assert transport.attempt("GET", "/v1/spec").status == 200
    assert router.accepted == 2
    transport.close()


def test_one_that_died_in_use_is_given_up_after_the_timeout(router: Router) -> None:
    """Without a sleep nothing shows that a connection is dead: the attempt times out, and the next
    one has a new connection.
    """
    transport = Transport(router.address, timeout=60.0, clock=Clock())
    transport.attempt("GET", "/v1/spec")
    router.forget()
    with pytest.raises(CollectorUnavailable) as caught:
        transport.attempt("GET", "/v1/spec", timeout=0.2)
    assert caught.value.maybe_applied
    assert transport.attempt("GET", "/v1/spec").status == 200
    transport.close()
