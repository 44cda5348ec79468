"""`headrace collect`: the collector as a process.

One process, one event loop, one journal. It binds to loopback unless there are tokens and TLS
(`ingest.server.listening`). SIGTERM and SIGINT drain it: new events get 503, ended episodes become
shards, and the exit status is 0. If the journal fails, it exits with status 1, and the next start
recovers. With `ServeOptions.supervise`, a parent process restarts it.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import uvicorn
import uvloop

from ingest.collector.address_file import say_address
from ingest.collector.collector import Collector
from ingest.collector.flow_control import FlowControl
from ingest.collector.flow_control_file import FlowControlFile
from ingest.collector.part_feed import Tap
from ingest.collector.statistics import DROPPED, LATE, CountsRecord
from ingest.collector.stores import Stores, stores_under
from ingest.collector.trainer_watch import TrainerWatch
from ingest.server.compacting import Compacting
from ingest.server.disk_space import DiskSpace
from ingest.server.listening import Access, ServeError, bind_of, starting
from ingest.server.memory import MemoryWatch
from ingest.server.options import ServeOptions
from ingest.server.routes import Routes
from ingest.server.supervisor import Supervisor
from ingest.web.connections import ConnectionWatch, Handshake
from ingest.web.limits import (
    BACKLOG,
    Budget,
    allow_all_descriptors,
    room_for_connections,
)
from storage.declarations.policy_files import load_declarations
from storage.system.files import FileLock
from storage.system.memory import few_arenas
from storage.system.startup import loading

log = logging.getLogger("headrace.server")


SWITCH_SECONDS = 0.0005
"""Seconds that the event loop may keep the journal's thread waiting (Python: 10 times that)."""

COLLECT_EVERY = 10_000
"""New objects between garbage collections (Python's default is 700).

Requests leave hardly any garbage, and collecting at the default rate takes a twentieth of the event
loop's time.
"""

FOLLOW_AGAIN_SECONDS = 1.0
"""Seconds between an unexpected error in a follower and the next try."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _ServerTask(Protocol):
    """A task that runs as long as the server."""

    async def follow(self) -> None:
        """Run until cancelled."""


async def keep_following(one: _ServerTask, again: float = FOLLOW_AGAIN_SECONDS) -> None:
    """Run a follower until cancelled; log an unexpected error, and start it again.

    Otherwise revoked tokens would be accepted, and nobody would notice.
    """
    while True:
        try:
            await one.follow()
        except Exception:
            log.exception("%s failed; it will be tried again", type(one).__name__)
        await asyncio.sleep(again)


class Server:
    """A collector with its routes on a socket, for a running event loop.

    `stores` is called after the socket is bound, so that a taken port changes nothing on disk.
    """

    def __init__(
        self, options: ServeOptions, stores: Callable[[], Stores], tap: Tap | None = None
    ) -> None:
        self.options = options
        self.access = Access(options.root, options.listening)
        self.socket = options.listener or bind_of(options.root, options.listening)
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
            root=options.root,
            redaction_key=kept.redaction_key,
            max_pending=options.limits.max_pending,
            max_open=options.limits.max_open,
        )
        limits = options.limits
        budget = Budget(limits.max_bodies)
        room = room_for_connections(limits.max_connections)
        self._watch = ConnectionWatch(limits, max_connections=room, budget=budget)
        self._following: list[_ServerTask] = [self.access, self._watch]
        trainers = self._watch_trainers(options.root)
        disks = None if options.root is None else DiskSpace(options.root)
        self._following += [] if disks is None else [disks]
        if options.root is not None and options.compact_hours is not None:
            self._following.append(Compacting(options.root, options.compact_hours))
        if options.root is not None and options.on_seal is not None:
            from ingest.server.seal_events import SealEvents  # noqa: PLC0415 - urllib3, for it alone

            count, token = self._shards, options.on_seal_token
            self._following.append(SealEvents(options.root, options.on_seal, token, count))
        if tap is None:  # a trainer's process manages its own memory
            self._following.append(MemoryWatch(self.collector, budget, limits))
        routes = Routes(
            self.collector,
            self.live,
            version=options.version,
            limits=limits,
            connections=self._watch,
            trainers=trainers,
            disks=disks,
        )
        config = uvicorn.Config(
            routes.router(budget, admit=self.access.admission),
            http=self._watch.protocol(),
            loop="none",
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,  # it ends within two seconds of the drain
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.idle_seconds) + 60,  # the watch closes them earlier
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = self.access.tls  # ours, so that it can load a renewed certificate
        self._server = _UvicornServer(config, self._watch)
        self._address_lock: FileLock | None = None

    def _shards(self) -> int:
        """How many shards were written; the object changes when the journal is read again."""
        return self.collector.sealing.totals.shards

    def _watch_trainers(self, root: Path | None) -> TrainerWatch | None:
        """Add the watches of the root's trainers to the followers; None without a root."""
        if root is None:
            return None
        watch = TrainerWatch(root, self.collector.policies)
        collector = self.collector
        records: list[CountsRecord[Any]] = [
            CountsRecord(collector.dropped, DROPPED, root, lambda: collector.collector_id),
            CountsRecord(collector.late, LATE, root, lambda: collector.collector_id),
        ]
        self._following += [FlowControlFile(collector, root), *records, watch]
        return watch

    @property
    def address(self) -> str:
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self.access.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set or the collector fails; return the exit status."""
        self.collector.start()
        self.live.start(self.collector.collector_id)
        await self.live.look()  # so that clients find the live version; limited, in case it hangs
        following = [asyncio.create_task(keep_following(one)) for one in self._following]
        serving = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.002)
        if self.options.root is not None:
            self._address_lock = say_address(self.options.root / "journal", self.address)
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
        if self._address_lock is not None:
            self._address_lock.release()
        if failed is not None:
            log.error("the collector cannot go on: %s; start it again to recover", failed)
        return 1 if failed is not None else 0


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, because a signal must first drain the collector.

    TLS handshakes are handled here, so that they count as connections.
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
    """Run a collector until a signal; return the exit status.

    With `options.supervise` this process forks the serving process, and the function returns in
    both: in each child with its own status, then in the parent with the last child's status. Files
    are created for this account and, if the umask allows it, its group. Raises ServeError, which
    has an exit status, and errors about invalid input.
    """
    os.umask(os.umask(0o077) | 0o007)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(COLLECT_EVERY)
    allow_all_descriptors()
    few_arenas()
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
    """The same options with a socket that outlives each child and reports when a child serves.

    Raises ServeError before binding, for anything that a child would refuse to start with.
    """
    root = _require_startable(options)
    Access(root, options.listening)
    listener = bind_of(root, options.listening)
    if options.declare is not None:
        options.declare()

    def announce(address: str, collector: Collector) -> None:
        supervisor.serving()
        if options.announce is None:
            return
        try:
            options.announce(address, collector)
        except OSError as error:  # the reader has ended since an earlier child
            log.warning("the address cannot be reported: %s", error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return replace(options, listener=listener, declare=None, announce=announce)


class _StoppedAtStart(BaseException):
    """A signal during the start. Not an Exception, so that no handler of errors catches it."""


async def _serve_until_signal(options: ServeOptions) -> int:
    """Serve until a signal. A signal during the start interrupts it, as safely as a kill would."""
    stop = asyncio.Event()

    def interrupt(*_: object) -> None:
        if not stop.is_set():
            stop.set()  # in case a finalizer, in which nothing can be raised, gets the signal
            raise _StoppedAtStart

    try:
        for number in SIGNALS:
            signal.signal(number, interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a supervisor blocks them
        server = _started(options)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, stop.set)
    except _StoppedAtStart:
        return 0
    return await server.run(stop)


def _started(options: ServeOptions) -> Server:
    root = _require_startable(options)

    def stores() -> Stores:
        if options.declare is not None:
            options.declare()
        return stores_under(root, options.compression)

    with loading():
        return Server(options, stores)


def _require_startable(options: ServeOptions) -> Path:
    """The root, if a policy is declared, or will be when the address is bound. Raises ServeError.

    A file in place of a folder would fail every start.
    """
    root = options.root
    for name in ("", "policies", "keys", "journal", "shards"):
        path = (root or Path()) / name
        if path.exists() and not path.is_dir():
            raise ServeError(f"{path}: expected a folder, got something else")
    if root is None or (options.declare is None and not load_declarations(root)):
        raise ServeError(
            f"no policy is declared under {(root or Path()) / 'policies'}: start with "
            "--observation box:4 --action discrete:2, --env CartPole-v1 or --policy FILE"
        )
    return root
