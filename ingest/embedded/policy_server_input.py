"""`PolicyServerInput`: an input reader that is a collector, in the trainer's own process.

    inputs = PolicyServerInput(None, "127.0.0.1", 9900, root="run", policies=declaration)
    inputs.publish(learner.policy)
    while True:
        batch = inputs.next()

or as the input of a `RolloutWorker`, whose policies it declares and publishes:

    RolloutWorker(policy=..., input_=lambda ioctx: PolicyServerInput(ioctx, "127.0.0.1", 9900))

Clients connect to it as to any collector. It runs in a thread with its own event loop. `next`
returns ended episodes, and parts of long ones, as soon as they are durable, before their shard is
written. With a `root` everything is journaled and written to shards as by `headrace collect`, and
`next` reads from the shards what did not fit in its queue, or remains from earlier runs. Without a
root nothing is on disk: every reply says `durable: false`, and a full queue refuses events (429)
until `next` is called.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvloop

from ingest.collector.collector import Collector
from ingest.collector.stores import Stores, stores_in_memory, stores_under
from ingest.embedded.live_reading import LiveReading
from ingest.embedded.local_publisher import LocalPublisher, Publishable
from ingest.embedded.worker_policies import IDENTITY, worker_policies
from ingest.protocol.errors import CollectorFailed
from ingest.server.declare import declare, keeping_settings
from ingest.server.options import Listening, ServeOptions
from ingest.server.process import Server
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations
from storage.experience.interfaces import InputReader, ReaderError, ReaderState
from storage.objects.opening import require_local
from storage.reading.batching import Mode
from storage.reading.exclusion import ReaderStats
from storage.reading.ledger import Ranges
from storage.reading.multi_agent_reader import JointStats
from storage.reading.untrained_rows import UntrainedRows

log = logging.getLogger("headrace.server")

CLOSE_SECONDS = 15.0
"""Seconds, longer than a drain takes; a thread that runs longer is left running."""


class PolicyServerInput(InputReader):
    """Hosts a collector on `address`:`port` (0: any free port) and reads what it collects.

    - `ioctx`: the context of a worker's input creator, or None without a worker. The worker's
      policies are declared with their spaces, except for settings that are declared under `root`.
      At the start the worker takes over the live versions, or its weights become live if there are
      none; then `next` publishes the changed policies. Without a `state`, a single policy is read
      from behind the rows that its live version was trained on. The defaults of reading follow the
      worker's sampling: `mode` "fragments" (or "episodes") of `rollout_fragment_length` rows, of
      its one policy or, with `multi_agent`, of all.
    - `idle_timeout`: seconds without data after which `next` returns an empty batch.
    - `max_sample_queue_size` and `max_sample_queue_bytes` (raw) limit the parts that wait for
      `next`. With a `root`, parts beyond these limits are read from their shards later; without
      one, clients get 429.
    - `policies`: declarations, stored under `root` if there is one, in addition to those already
      there.
    - `policy_id`: the policy whose steps `next` returns; required if the policies' spaces differ.
    - `mode`, `batch_size`, `columns`, `training_disabled`, `state`: as for `ShardReader`. A batch
      has the available rows, at most `batch_size`; with `eager=False` it has exactly that many.
    - `multi_agent`: `next` returns MultiAgentBatches of whole episodes of all policies, as
      `MultiAgentReader` does: those available, or with `eager=False` at least `batch_size`
      environment steps. For policies without `steps_per_version`.
    - `tls_cert`, `tls_key`, `allow_hosts`, `insecure_no_tls`: as for `headrace collect`.

    The constructor raises ServeError for a port that is taken and for an address other than
    loopback without TLS and a token under its `root`, JournalLocked for a root that another
    collector uses, ValueError for policies that do not fit. `next` raises CollectorFailed if the
    collector had to stop. Only one thread at a time may read; any thread may call `publish` and
    `close`.
    """

    def __init__(
        self,
        ioctx: object,
        address: str,
        port: int,
        idle_timeout: float = 3.0,
        max_sample_queue_size: int = 20,
        *,
        root: Path | str | None = None,
        policies: PolicyDeclaration | Iterable[PolicyDeclaration] = (),
        policy_id: str | None = None,
        multi_agent: bool | None = None,
        max_sample_queue_bytes: int = 64_000_000,
        mode: Mode | None = None,
        batch_size: int | None = None,
        eager: bool | None = None,
        columns: Sequence[str] | None = None,
        training_disabled: bool = False,
        state: Mapping[str, Any] | None = None,
        tls_cert: Path | str | None = None,
        tls_key: Path | str | None = None,
        allow_hosts: Sequence[str] = (),
        insecure_no_tls: bool = False,
    ) -> None:
        self.idle_timeout = idle_timeout
        self._root = None if root is None else require_local(root, "root")
        self._worker = worker_policies(ioctx)
        given = [policies] if isinstance(policies, PolicyDeclaration) else list(policies)
        own = self._worker.declarations() if self._worker is not None else []
        self._policies = _declared(self._root, given, own)
        chosen = {declaration.policy_id for declaration in (*given, *own)}
        self._process = os.getpid()
        self._begun = self._closed = False
        self.address = f"{address}:{port}"
        bounds = {"max_parts": max_sample_queue_size, "max_bytes": max_sample_queue_bytes}
        asked = {
            "policy_id": policy_id,
            "multi_agent": multi_agent,
            "mode": mode,
            "batch_size": batch_size,
            "eager": eager,
        }
        usual = _READING if self._worker is None else self._worker.reading()
        if self._worker is not None and columns is not None:
            columns = list(dict.fromkeys((*columns, *IDENTITY)))
        options = {"columns": columns, "training_disabled": training_disabled}
        self._live = self._read(_merged(usual, asked), bounds, options)
        self._reader = self._live.reader
        self._publishing = LocalPublisher()
        where = Listening(address, port, tls_cert, tls_key, insecure_no_tls, tuple(allow_hosts))
        to_declare = [self._policies[name] for name in sorted(chosen)]
        self._host = _Host(self._serve_on(where, to_declare), self._live.fail)
        try:
            self.address, self._collector_id, self._next_ordinals = self._host.start()
            atexit.register(self.close)
            if state is not None:
                self.load_state_dict(state)
            if self._worker is not None:
                self._reader.want(IDENTITY)
                self._worker.begin(self._weights.store, self._publishing, self._live.position)
                if state is None and self._live.single:
                    fresh = self._reader.state_dict()
                    self._reader.load_state_dict(self._worker.position(fresh))
        except BaseException:
            self.close()
            raise

    def _read(
        self, reading: dict[str, Any], bounds: dict[str, int], options: dict[str, Any]
    ) -> LiveReading:
        """The reader of one policy's rows, or of all policies' episodes."""
        policy_id, mode = reading.pop("policy_id"), reading.pop("mode")
        if reading.pop("multi_agent"):
            _check_for_all(policy_id, mode)
            return LiveReading.of_all(self._root, self._policies, bounds, **reading, **options)
        schema_id = _schema_of(self._policies, policy_id)
        return LiveReading.of_one(
            self._root, schema_id, policy_id, bounds, mode=mode, **reading, **options
        )

    def _serve_on(
        self, where: Listening, given: Sequence[PolicyDeclaration]
    ) -> Callable[[Callable[[str, Collector], None]], Server]:
        """A function that creates the server, on the event loop that it will run on."""
        root = self._root

        def stores() -> Stores:
            if root is None:
                return stores_in_memory(self._policies)
            for declaration in given:
                for change in declare(root, declaration, redeclare=True):
                    log.info("%s", change)
            return stores_under(root)

        def make(announce: Callable[[str, Collector], None]) -> Server:
            options = ServeOptions(root, where, announce=announce)
            server = Server(options, stores, tap=self._live.tap)
            self._weights = server.live
            return server

        return make

    # reading

    def next(self, timeout: float | None = None) -> Any:
        """Return the next batch, of one policy or of all.

        It is empty if none is available for `timeout` seconds (default: `idle_timeout`). Raises
        CollectorFailed after everything that was durable before the failure has been read,
        MixedSchemas if a root has steps of other spaces under the policy's id, ReaderError after
        `close` and in a forked process.
        """
        self._require_own()
        self._begun = True
        if self._worker is not None:
            self._worker.publish_changed(self._live.position)
        batch = self._reader.next(self.idle_timeout if timeout is None else timeout)
        if self._worker is not None:
            self._worker.read(batch)
        return batch

    def want(self, columns: Sequence[str]) -> None:
        self._reader.want(columns)

    def __repr__(self) -> str:
        where = "in memory" if self._root is None else f"root={str(self._root)!r}"
        policies = ", ".join(sorted(self._policies))
        closed = "; closed" if self._closed else ""
        return f"PolicyServerInput({self.address!r}, {where}, policies {policies}{closed})"

    @property
    def stats(self) -> ReaderStats | JointStats:
        """The reader's statistics; `stats.shards` counts runs of parts as well as shards."""
        return self._reader.stats

    @property
    def queued(self) -> int:
        """The number of parts that wait for `next`."""
        return self._live.waiting

    @property
    def overflowed(self) -> int:
        """The number of parts that did not fit in the queue and are read from their shards."""
        return self._live.dropped

    def state_dict(self) -> dict[str, Any]:
        """The position, as the reader's `state_dict`: what was delivered, by ordinals."""
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, before the first `next`.

        Without a root it has no effect. Raises ReaderState for a damaged position, and for one
        ahead of the journal: the journal was then restored from a backup and would assign the same
        ordinals again.
        """
        if self._begun:
            raise ReaderError("load_state_dict: expected it before the first next()")
        self._reader.load_state_dict(state)
        read = [pair for ledger in self._live.taken for pair in ledger.streams().items()]
        for stream, ranges in read:
            collector_id = stream.rpartition("-")[0]
            known = self._next_ordinals.get(stream, 0)
            if collector_id == self._collector_id and (ranges.last or 0) >= known:
                raise ReaderState(
                    f"the position has ordinal {ranges.last} of stream {stream}, but the journal's "
                    f"next one is {known}: the journal is older than the position"
                )

    # acting

    def publish(
        self,
        policy: Publishable,
        *,
        policy_id: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        lineage: Mapping[str, Ranges] | None = None,
    ) -> int:
        """Make a policy's weights live for the clients; return the version that they get.

        While a rollback pins the policy, that is the version it went back to: the weights are
        stored as a candidate, and a warning is logged. `policy_id` may be left out if one policy is
        declared. `lineage`: the ordinals trained on, by stream; those of its rows that `next` has
        not yet returned are noted as not trained on. A root keeps the newest 32 versions, and one
        per hour for 30 days. Raises ValueError, WeightStoreError, GenerationConflict.
        """
        self._require_own()
        name = policy_id
        if name is None and len(self._policies) == 1:
            (name,) = self._policies
        if name not in self._policies:
            raise ValueError(f"policy_id: expected one of {sorted(self._policies)}, got {name!r}")
        store, ranges = self._weights.store(name), dict(lineage or {})
        digest = self._publishing.keep(
            store,
            policy,
            metrics=metrics or {},
            lineage=ranges,
            untrained=UntrainedRows().settle(ranges, self._live.position),
        )
        return self._publishing.publish(store, digest)[0].version

    # the end

    def close(self) -> None:
        """Refuse new events, write ended episodes, and stop the thread, within a few seconds."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        if not self._host.stop(CLOSE_SECONDS):
            log.error("the collector at %s has not stopped", self.address)
        if self._root is None and (left := self._live.waiting):
            log.warning("%s parts were acknowledged and never read (durable: false)", left)
        self._reader.close()

    def _require_own(self) -> None:
        if os.getpid() != self._process:
            raise ReaderError("the collector runs in the process that this one was forked from")


class _Host:
    """A server in a thread with its own event loop. `failed` gets the error if it fails."""

    def __init__(
        self,
        make: Callable[[Callable[[str, Collector], None]], Server],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._make, self._failed = make, failed
        self._ready: Future[tuple[str, str, dict[str, int]]] = Future()
        self._stop: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-server", daemon=True)

    def start(self) -> tuple[str, str, dict[str, int]]:
        """Return its address, its collector's id, and each stream's next ordinal at the start.

        Raises the error that prevented the start.
        """
        self._thread.start()
        return self._ready.result()

    def stop(self, timeout: float) -> bool:
        """Drain the collector; return whether it has ended within `timeout` seconds."""
        if self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop may just have ended by itself
                self._stop()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # any error must reach the reader's thread
            if self._ready.done():
                log.exception("the collector in this process failed")
                self._failed(CollectorFailed(f"the collector in this process failed: {error!r}"))
            else:
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def announce(address: str, collector: Collector) -> None:
            ordinals = collector.sealing.next_ordinals
            self._ready.set_result((address, collector.collector_id, ordinals))

        server = self._make(announce)
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        await server.run(stop)
        if not stop.is_set():
            cause = server.collector.journal.failure
            self._failed(CollectorFailed(f"the collector in this process stopped: {cause}"))


_READING: Mapping[str, Any] = {
    "policy_id": None,
    "multi_agent": False,
    "mode": "transitions",
    "batch_size": 4096,
    "eager": True,
}
"""The defaults of `next` without a worker."""


def _merged(usual: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options given, with defaults for the others, for one policy or for all of them."""
    usual = dict(usual)
    if asked["policy_id"] is not None:
        usual["multi_agent"] = False
    if asked["multi_agent"]:
        usual["policy_id"] = None
    merged = {k: value if asked[k] is None else asked[k] for k, value in usual.items()}
    if merged["multi_agent"] and asked["mode"] is None:
        merged["mode"] = "transitions"
    return merged


def _declared(
    root: Path | None, given: Sequence[PolicyDeclaration], own: Sequence[PolicyDeclaration]
) -> dict[str, PolicyDeclaration]:
    """The policies in force: those under the root, then a worker's `own`, then those given.

    Later ones replace earlier ones. Raises ValueError for none.
    """
    found = {} if root is None else load_declarations(root)
    found |= {one.policy_id: keeping_settings(found.get(one.policy_id), one) for one in own}
    found |= {declaration.policy_id: declaration for declaration in given}
    if not found:
        where = "" if root is None else f" and none is declared under {root / 'policies'}"
        raise ValueError(
            f"policies: expected one or more declarations, or the context of a worker, got "
            f"none{where}"
        )
    return dict(sorted(found.items()))


def _check_for_all(policy_id: str | None, mode: Mode) -> None:
    if policy_id is not None or mode not in ("transitions", "episodes"):
        raise ValueError(
            "multi_agent: expected no policy_id, and mode transitions or episodes, got "
            f"{f'mode {mode!r}' if policy_id is None else f'policy_id {policy_id!r}'}"
        )


def _schema_of(policies: Mapping[str, PolicyDeclaration], policy_id: str | None) -> str:
    """The one schema of the policies that are read. Raises ValueError."""
    if policy_id is not None and policy_id not in policies:
        raise ValueError(f"policy_id: expected one of {sorted(policies)}, got {policy_id!r}")
    chosen = [policies[policy_id]] if policy_id is not None else list(policies.values())
    schemas = {declaration.schema_id for declaration in chosen}
    if len(schemas) > 1:
        raise ValueError(
            f"policies: expected policies of the same spaces, got {len(schemas)} different pairs "
            f"among {sorted(policies)}: pass policy_id= to choose whose steps next() returns, or "
            "multi_agent=True for episodes of all of them"
        )
    return schemas.pop()
