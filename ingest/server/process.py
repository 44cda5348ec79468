"""`headrace collect`: the collector as a process.

One process, one event loop, one journal. It binds to loopback unless there are tokens and TLS
(`ingest.server.listening`). SIGTERM and SIGINT drain: new events get 503, what has ended
becomes shards, and the exit status is 0. When the journal fails it exits with status 1 and leaves
recovery to its next start. `ServeOptions.supervise` has a process that starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import uvicorn
import uvloop

from ingest.collector.address_file import LiveAddress, say_address
from ingest.collector.collector import Collector
from ingest.collector.flow_control import FlowControl
from ingest.collector.flow_control_file import FlowControlFile
from ingest.collector.part_feed import Tap
from ingest.collector.statistics import DroppedRecord
from ingest.collector.stores import Stores, stores_under
from ingest.collector.trainer_watch import TrainerWatch
from ingest.server.listening import Access, Listening, ServeError, bind, starting
from ingest.server.memory import MemoryWatch
from ingest.server.routes import Routes
from ingest.server.supervisor import Supervisor
from ingest.web.connections import ConnectionWatch, Handshake
from ingest.web.limits import (
    BACKLOG,
    Budget,
    ServerLimits,
    allow_all_descriptors,
    return_memory_early,
    room_for_connections,
)
from storage.declarations.policy_files import load_declarations
from storage.system.files import FileLock
from storage.system.startup import loading

log = logging.getLogger("headrace.server")


SWITCH_SECONDS = 0.0005
"""How long the event loop may keep the journal's thread waiting (Python's default is 10 times)."""

COLLECT_EVERY = 10_000
"""New objects between two looks for garbage (Python's default is 700), of which requests leave
hardly any; to look so often takes a twentieth of the event loop's time.
"""

FOLLOW_AGAIN_SECONDS = 1.0
"""Between an error that nobody foresaw in what is followed, and the next try."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class ServeOptions:
    """Where and how a collector serves. Without a root there are no tokens: loopback alone.

    `listener` is bound already, to what `listening` says.
    """

    root: Path | None
    listening: Listening = field(default_factory=Listening)
    compression: str = "zstd"
    version: str = ""
    announce: Callable[[str, Collector], None] | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    supervise: bool = False
    listener: socket.socket | None = None


class _Follower(Protocol):
    """What looks after something for as long as the server runs."""

    async def follow(self) -> None:
        """Until cancelled."""


async def keep_following(one: _Follower, again: float = FOLLOW_AGAIN_SECONDS) -> None:
    """Follow until cancelled. An error that nobody foresaw is told, and does not end it.

    Without it revoked tokens would be let in, and nobody would know.
    """
    while True:
        try:
            await one.follow()
        except Exception:
            log.exception("%s failed, and goes on", type(one).__name__)
        await asyncio.sleep(again)


class Server:
    """A collector with its routes on a socket, for an event loop that already runs.

    `stores` are opened once the socket is bound, so that a taken port changes nothing on disk.
    """

    def __init__(
        self, options: ServeOptions, stores: Callable[[], Stores], tap: Tap | None = None
    ) -> None:
        self.options = options
        self.access = Access(options.root, options.listening)
        self.socket = options.listener or _bound(options)
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
            flow=FlowControl(kept.policies, self.live.followed_version),
            arm=self.live.arm,
            tap=tap,
            durable=kept.durable,
            redaction_key=kept.redaction_key,
            max_pending=options.limits.max_pending,
            max_open=options.limits.max_open,
        )
        limits = options.limits
        budget = Budget(limits.max_bodies)
        room = room_for_connections(limits.max_connections)
        self._watch = ConnectionWatch(limits, max_connections=room, budget=budget)
        self._following: list[_Follower] = [self.access, self._watch]
        trainers = self._watch_trainers(options.root)
        if tap is None:  # a trainer's memory is its own affair
            self._following.append(MemoryWatch(self.collector, budget))
        routes = Routes(
            self.collector,
            self.live,
            version=options.version,
            limits=limits,
            connections=self._watch,
            trainers=trainers,
        )
        config = uvicorn.Config(
            routes.router(budget, admit=self.access.admission),
            http=self._watch.protocol(),
            loop="none",
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,  # gone within two seconds of the drain
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.idle_seconds) + 60,  # the watch closes them before
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = self.access.tls  # ours, so that a renewed certificate can be read into it
        self._server = _Server(config, self._watch)
        self._said: FileLock | None = None

    def _watch_trainers(self, root: Path | None) -> TrainerWatch | None:
        """What trainers under the same root are told, and what they say."""
        if root is None:
            return None
        watch = TrainerWatch(root, self.collector.policies)
        collector = self.collector
        dropped = DroppedRecord(collector.dropped, root, lambda: collector.collector_id)
        self._following += [FlowControlFile(collector, root), dropped, watch]
        return watch

    @property
    def address(self) -> str:
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self.access.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set or the collector fails; answers the exit status."""
        self.collector.start()
        self.live.start(self.collector.collector_id)
        await self.live.look()  # so that clients find what is live; not for long, should it hang
        following = [asyncio.create_task(keep_following(one)) for one in self._following]
        serving = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.002)
        if self.options.root is not None:
            self._said = say_address(self.options.root / "journal", self.address)
        if self.options.announce is not None:
            self.options.announce(self.address, self.collector)
        ended = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self.collector.journal.failed.wait()),
        ]
        await asyncio.wait([serving, *ended], return_when=asyncio.FIRST_COMPLETED)
        failed = self.collector.journal.failure
        for task in (*ended, *following):
            task.cancel()
        self.live.close()
        await self.collector.drain(self.options.limits.drain_seconds)
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, 1.0)
        await self.live.ended()
        if self._said is not None:
            self._said.release()
        if failed is not None:
            log.error("the collector cannot go on: %s; start it again to recover", failed)
        return 1 if failed is not None else 0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal here first drains the collector.

    A TLS handshake is ours, so that it counts as a connection.
    """

    def __init__(self, config: uvicorn.Config, watch: ConnectionWatch) -> None:
        super().__init__(config)
        self._watch = watch

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop, config = asyncio.get_running_loop(), self.config
        context = config.ssl

        def plain() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
                config=config, server_state=self.server_state, app_state={}
            )

        def secured() -> asyncio.Protocol:
            return Handshake(self._watch, context, plain) if context else plain()

        self.servers = [
            await loop.create_server(secured, sock=listener, backlog=config.backlog)
            for listener in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: ServeOptions) -> int:
    """Run a collector until a signal; answers the exit status.

    With `options.supervise` this process forks the one that serves, and both come out of here: each
    child with its own status, then this one with the last child's. What is written is for this
    account and, as far as the umask lets it, the account's group.
    Raises ServeError, which has an exit status, and what tells of bad input.
    """
    os.umask(os.umask(0o077) | 0o007)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(COLLECT_EVERY)
    allow_all_descriptors()
    return_memory_early()
    if options.supervise:
        with starting():
            supervisor = Supervisor()
            options = _supervised(options, supervisor)
            ended = supervisor.stay_up()
        if ended is not None:
            return ended
    with starting(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_until_signal(options))


def _supervised(options: ServeOptions, supervisor: Supervisor) -> ServeOptions:
    """The same with a socket that outlives each child, which says when it serves.

    Raises ServeError for what a child would refuse to start with, before anything is bound.
    """
    _require_startable(options.root)
    Access(options.root, options.listening)

    def announce(address: str, collector: Collector) -> None:
        supervisor.serving()
        if options.announce is None:
            return
        try:
            options.announce(address, collector)
        except OSError as error:  # who read it is gone since an earlier child said it
            log.warning("nobody hears where this serves: %s", error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return replace(options, listener=_bound(options), announce=announce)


def _bound(options: ServeOptions) -> socket.socket:
    """A bound socket. Raises ServeError, which says where this root's collector serves already."""
    try:
        return bind(options.listening)
    except ServeError as error:
        live = None if options.root is None else LiveAddress.of(options.root / "journal")
        if live is None:
            raise
        with contextlib.closing(live):
            text = (
                f"{error}; the collector of {options.root} runs already and serves {live.address}"
            )
            raise ServeError(text, error.exit_status) from error


class _Stopped(BaseException):
    """A signal during the start; no error, so that nothing takes it for one."""


async def _serve_until_signal(options: ServeOptions) -> int:
    """A signal ends a start where it is, even in a wait: what it leaves is what a kill would."""
    stop = asyncio.Event()

    def interrupt(*_: object) -> None:
        if not stop.is_set():
            stop.set()  # should a finalizer, which raises nothing, be where the signal comes
            raise _Stopped

    try:
        for number in SIGNALS:
            signal.signal(number, interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a supervisor's child has them blocked
        server = _started(options)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, stop.set)
    except _Stopped:
        return 0
    return await server.run(stop)


def _started(options: ServeOptions) -> Server:
    root = _require_startable(options.root)
    with loading():
        return Server(options, lambda: stores_under(root, options.compression))


def _require_startable(root: Path | None) -> Path:
    """The root, where a policy is declared. Raises ServeError."""
    if root is not None:
        _require_folders(root)
    if root is None or not load_declarations(root):
        raise ServeError(
            f"no policy is declared under {(root or Path()) / 'policies'}: start with "
            "--observation box:4 --action discrete:2, --env CartPole-v1 or --policy FILE"
        )
    return root


def _require_folders(root: Path) -> None:
    """Raise ServeError for a file in the place of a folder: it stays one at each further start."""
    for path in (root, root / "policies", root / "keys", root / "journal", root / "shards"):
        if path.exists() and not path.is_dir():
            raise ServeError(f"{path}: expected a folder, got something else")
