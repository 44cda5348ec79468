"""A collector that fails on command: a real HTTP server that follows protocol v1.

It keeps events in memory, recognises repeated ones by (episode, seq), and plays the faults that a
test lists. It is not part of the package.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np

from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal, already_started, completed, not_found
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Discrete, space_to_json
from tests.closing import Closing

OBSERVATION = Box((2,), np.dtype("float32"), np.array(-10.0), np.array(10.0))
ACTION = Discrete(3)


@dataclass
class Answer:
    """An answer to a request."""

    status: int
    body: bytes
    content_type: str = wire.MSGPACK
    headers: dict[str, str] = field(default_factory=dict)


class ConnectionCut(Exception):
    """The connection is reset without an answer."""


Serve = Callable[[], Answer]
Fault = Callable[[Serve], Answer]


def cut_before(serve: Serve) -> Answer:
    """The request has no effect and no answer."""
    raise ConnectionCut


def cut_after(serve: Serve) -> Answer:
    """The request takes effect, and its answer is lost."""
    serve()
    raise ConnectionCut


def pass_by(serve: Serve) -> Answer:
    return serve()


def answering(status: int, code: str, **headers: str) -> Fault:
    def fault(serve: Serve) -> Answer:
        body = msgspec.json.encode({"error": {"code": code, "message": f"scripted {code}"}})
        return Answer(status, body, wire.JSON, headers)

    return fault


@dataclass
class Gate:
    """Holds a request until the test opens it."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, serve: Serve) -> Answer:
        self.reached.set()
        self.opened.wait(120)
        return serve()


@dataclass
class Record:
    """One episode as the collector has it: its start, then its events by seq from 1."""

    instance: str
    start: wire.Start
    events: list[Any] = field(default_factory=list)
    ended: bool = False
    broken: str | None = None

    @property
    def rewards(self) -> list[float]:
        """The reward of each step."""
        found: list[float] = []
        for event in self.events:
            if isinstance(event, wire.LogAction | wire.GetAction):
                found.append(getattr(event, "reward", None) or 0.0)
            elif isinstance(event, wire.LogReturns):
                found[-1] += event.reward
        return found

    @property
    def infos(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for event in self.events:
            if isinstance(event, wire.LogAction):
                found.append(event.info or {})
            elif isinstance(event, wire.LogReturns) and event.info:
                found[-1] = found[-1] | event.info
        return found


class ScriptedCollector(Closing):
    """`faults` are played for the next POSTs, one each; see the functions above."""

    def __init__(self, port: int = 0) -> None:
        self.faults: deque[Fault] = deque()
        self.chance: Callable[[], Fault] = lambda: pass_by
        self.judge: Callable[[Any], str | None] = lambda event: None
        self.batch_judge: Callable[[Any], None] = lambda batch: None
        self.instances: dict[str, set[int]] = {}
        self.episodes: dict[str, Record] = {}
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.late: list[wire.LogReturns] = []
        self.version: int | None = 3
        self.policies = ["default"]
        self.limits = {"max_body": 64_000_000, "max_events": wire.MAX_EVENTS}
        self._next_instance = 0
        self._lock = threading.RLock()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ScriptedCollector:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def cut_at_random(self, seed: int, share: float) -> None:
        """Reset this many of the connections, half of them after the request took effect."""
        rng = random.Random(seed)
        kinds = (cut_before, cut_after)
        self.chance = lambda: rng.choice(kinds) if rng.random() < share else pass_by

    def bodies(self, path: str) -> list[bytes]:
        return [body for found, _, body in self.requests if found == path]

    # --- the protocol ------------------------------------------------------------------------

    def serve(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            self.requests.append((path, headers, body))
            fault = self.chance()
            if self.faults and method == "POST":
                fault = self.faults.popleft()
        return fault(lambda: self._locked(path, headers, body))

    def _locked(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            try:
                return self._route(path, headers, body)
            except Refusal as refusal:
                text = msgspec.json.encode({"error": refusal.to_json()})
                return Answer(refusal.status, text, wire.JSON)

    def _route(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if path == "/v1/spec":
            return Answer(200, msgspec.json.encode(self._spec()), wire.JSON)
        if path == "/v1/instances":
            return _answer(self._register(wire.decode(body, wire.MSGPACK, wire.Register)))
        if path == "/v1/events":
            return _answer(self._events(wire.decode(body, wire.MSGPACK, wire.Batch)))
        if path == "/v1/episodes":
            event = wire.decode(body, wire.MSGPACK, wire.Start)
            self._start(headers["headrace-instance"], event)
            return _answer({"episode_id": event.episode_id})
        if path == "/v1/actions":
            return _answer(self._actions(wire.decode(body, wire.MSGPACK, wire.ActionBatch)))
        raise Refusal("no_route", f"there is nothing at {path}")

    def _spec(self) -> dict[str, Any]:
        policy = {
            "observation": space_to_json(OBSERVATION),
            "action": space_to_json(ACTION),
            "schema_id": "0" * 12,
            "spec": None,
            "live_version": self.version,
        }
        policies = dict.fromkeys(self.policies, policy)
        return {"protocol": 1, "durable": True, "policies": policies, "limits": self.limits}

    def _register(self, request: wire.Register) -> wire.Registered:
        self._next_instance += 1
        instance = f"instance-{self._next_instance}"
        self.instances[instance] = set()
        return wire.Registered(instance=instance)

    def _events(self, batch: Any) -> wire.EventsReply:
        self.batch_judge(batch)
        reply = wire.EventsReply(durable=True, accepted=0)
        for index, event in enumerate(batch.events):
            try:
                if self._apply(batch.instance, event):
                    reply.accepted += 1
                else:
                    reply.duplicates += 1
            except Refusal as refusal:
                reply.refused.append(wire.ItemError.of(index, refusal))
                if refusal.breaks_episode and event.episode_id in self.episodes:
                    self.episodes[event.episode_id].broken = refusal.message
        return reply

    def _apply(self, instance: str, event: Any) -> bool:
        code = self.judge(event)
        if code is not None:
            raise Refusal(code, f"scripted {code}", None, event.episode_id)
        if isinstance(event, wire.Start):
            return self._start(instance, event)
        if isinstance(event, wire.LogReturns) and event.step is not None:
            self.late.append(event)
            return True
        record = self.episodes.get(event.episode_id)
        if record is None:
            raise not_found(event.episode_id)
        if record.instance != instance:
            raise Refusal("conflict", "started by another client", None, event.episode_id)
        if record.broken is not None:
            raise Refusal("broken", record.broken, None, event.episode_id)
        expected = len(record.events) + 1
        if event.seq < expected:
            if record.events[event.seq - 1] != event:
                raise Refusal("conflict", "other content", None, event.episode_id, expected)
            return False
        if event.seq > expected:
            raise Refusal("gap", f"got {event.seq}", None, event.episode_id, expected)
        if record.ended:
            raise completed(event.episode_id)
        record.events.append(event)
        record.ended = isinstance(event, wire.End)
        return True

    def _start(self, instance: str, event: wire.Start) -> bool:
        if instance not in self.instances:
            raise Refusal("unknown_instance", "register anew", None, event.episode_id)
        known = self.episodes.get(event.episode_id)
        if event.start in self.instances[instance]:
            if known is not None and known.start.start != event.start:
                raise Refusal("conflict", "another episode's number", None, event.episode_id)
            return False
        if known is not None:
            raise (completed if known.ended else already_started)(event.episode_id)
        assert event.start is not None
        self.instances[instance].add(event.start)
        self.episodes[event.episode_id] = Record(instance, event)
        return True

    def _actions(self, batch: wire.ActionBatch) -> wire.ActionsReply:
        refused = self._events(wire.Batch(instance=batch.instance, events=batch.events)).refused
        replies = []
        for request in batch.actions:
            reply = wire.ActionReply(episode_id=request.episode_id, policy_version=3)
            try:
                if self.version is None:
                    raise Refusal("no_version", "publish one", None, request.episode_id)
                self._apply(batch.instance or "", request)
                assert request.seq is not None
                reply.action = Codec(ACTION).encode(request.seq % 3)
                reply.durable_seq = request.seq
            except Refusal as refusal:
                reply.error = refusal.to_json()
            replies.append(reply)
        return wire.ActionsReply(durable=True, actions=replies, refused=refused)


def _answer(message: Any) -> Answer:
    return Answer(200, wire.encode(message, wire.MSGPACK))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A cut connection is on the script."""


def _handler(collector: ScriptedCollector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _reply(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                answer = collector.serve(self.command, self.path, headers, body)
            except ConnectionCut:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                raise
            self.send_response(answer.status)
            for name, value in {
                "content-type": answer.content_type,
                "content-length": str(len(answer.body)),
                **{name.replace("_", "-"): value for name, value in answer.headers.items()},
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_POST = _reply

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return Handler
