"""`headrace collect`: the collector as a process.

One process, one event loop, one journal. It binds to loopback only: anything else needs tokens,
which this version does not have. SIGTERM and SIGINT drain: new events get 503, what has ended
becomes shards, and the exit status is 0. When the journal fails it exits with status 1 and leaves
recovery to its next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop

from ingest.collector import Collector
from ingest.errors import IngestError
from ingest.flow import FlowControl
from ingest.routes import MAX_BODY, Routes
from ingest.stores import Stores, stores_under
from ingest.tap import Tap
from storage.policy_files import load_declarations

log = logging.getLogger("headrace.server")


SWITCH_SECONDS = 0.0005
"""How long the event loop may keep the journal's thread waiting (Python's default is 10 times)."""


class ServeError(IngestError):
    """The collector cannot start; the text says why and what to do."""


@dataclass(frozen=True)
class ServeOptions:
    """Where and how a collector serves. Port 0 takes a free one."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 8642
    compression: str = "zstd"
    version: str = ""
    announce: Callable[[str, Collector], None] | None = None


def require_loopback(host: str) -> None:
    """Raise ServeError unless `host` is this machine only."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except (OSError, ValueError) as error:
        raise ServeError(f"host: expected a name or an address, got {host!r}: {error}") from error
    if not address.is_loopback:
        raise ServeError(
            f"host {host!r} is not loopback: without access tokens the collector serves only this "
            "machine; bind to 127.0.0.1 and put an authenticating proxy before it"
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServeError when the port is taken."""
    require_loopback(host)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServeError(f"cannot bind {host}:{port}: {error}") from error
    return listener


class Server:
    """A collector with its routes on a socket, for an event loop that already runs.

    `stores` are opened once the socket is bound, so that a taken port changes nothing on disk.
    """

    def __init__(
        self, options: ServeOptions, stores: Callable[[], Stores], tap: Tap | None = None
    ) -> None:
        self.options = options
        self.socket = bind(options.host, options.port)
        try:
            kept = stores()
        except BaseException:
            self.socket.close()
            raise
        self.live = kept.live
        self.collector = Collector(
            kept.journal,
            kept.writer,
            kept.policies,
            flow=FlowControl(kept.policies, self.live.version),
            tap=tap,
            durable=kept.durable,
        )
        routes = Routes(self.collector, self.live, version=options.version)
        config = uvicorn.Config(
            routes.router(MAX_BODY),
            http="httptools",
            loop="none",
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,  # drained in 3 s, gone in 5
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            backlog=1024,
        )
        self._server = _Server(config)

    @property
    def address(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set or the journal fails; answers the exit status."""
        self.collector.start()
        following = asyncio.create_task(self.live.follow())
        serving = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.002)
        if self.options.announce is not None:
            self.options.announce(self.address, self.collector)
        ended = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self.collector.failed.wait()),
        ]
        await asyncio.wait([serving, *ended], return_when=asyncio.FIRST_COMPLETED)
        failed = self.collector.failure
        for task in (*ended, following):
            task.cancel()
        self.live.close()
        await self.collector.drain()
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, 1.0)
        if failed is not None:
            log.error("the journal failed: %s; start again to recover", failed)
        return 1 if failed is not None else 0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal here first drains the collector."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: ServeOptions) -> int:
    """Run a collector in this process until a signal; answers the exit status."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_until_signal(options))


async def _serve_until_signal(options: ServeOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if not load_declarations(options.root):
        raise ServeError(
            f"no policy is declared under {options.root / 'policies'}: start with "
            "--observation box:4 --action discrete:2, --env CartPole-v1 or --policy FILE"
        )
    return await Server(options, lambda: stores_under(options.root, options.compression)).run(stop)
