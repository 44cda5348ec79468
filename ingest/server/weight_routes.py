"""Weights over HTTP: changes of the live version, versions, and downloads.

`WeightChanges` is for callers with the scope `weights:publish`. A publication is checked before
anything is stored. Its digest has to be right, and its weights safetensors of finite numbers, with
which a policy of the declared spaces computes finite numbers. All other fields have to be such that
they can be sent again, in JSON and in msgpack. The publisher proposes the version's number, and
gets 409 with the next number if it is another; a repeated request has the same answer.

`WeightDownloads` answers `GET /v1/policies/{id}/weights` with msgpack `{manifest, generation,
weights}` and a signed `ETag` of store, generation and highest version. `If-None-Match` with
`Prefer: wait=25` holds the request until the generation changes, or for that many seconds (then
304).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec

from ingest.access.admission import audit
from ingest.collector.live_policies import WEIGHTS_SECONDS, LivePolicies
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.protocol.messages import MSGPACK
from ingest.protocol.weights import Published
from ingest.web.asgi import Request, Response
from storage.errors import GenerationConflict, PolicyPinned, StorageError, WeightsNotFound
from storage.weights.manifest import Live, Pin, Served, decode_weights, plain_document
from storage.weights.off_chain import described
from storage.weights.store import WeightFolder

T = TypeVar("T")

_FIELDS = frozenset(wire.Publish.__struct_fields__)


class WeightChanges:
    """The routes that change the live version."""

    def __init__(self, live: LivePolicies) -> None:
        self._live = live
        self._one_at_a_time = asyncio.Lock()

    async def versions(self, request: Request) -> Response:
        return Response.of(await self._change(request, _versions), request)

    async def publish(self, request: Request) -> Response:
        self._require_files(request)
        message = request.decode(wire.Publish)
        now = await self._change(request, lambda store: _publish(store, message))
        return self._tell("published", request, now, sha256=message.sha256)

    async def rollback(self, request: Request) -> Response:
        self._require_files(request)
        message, by = request.decode(wire.Rollback), request.caller.token_id
        generation, why = message.generation, message.why
        now = await self._change(
            request,
            lambda store: store.rollback(
                message.to, expected_generation=generation, by=f"token {by}", why=why
            ),
        )
        return self._tell("rolled_back", request, now, to=message.to)

    async def resume(self, request: Request) -> Response:
        self._require_files(request)
        pin, now = await self._change(request, _resume)
        if pin is not None:
            self._audit("resumed", request, now, pinned_by=pin.by)
        return Response.of(wire.NowLive(version=now.version, generation=now.generation), request)

    async def served(self, request: Request) -> Response:
        policy_id = self._require_files(request)
        found = await self._change(
            request, lambda store: _serving(store, self._live.own_record(policy_id))
        )
        return Response.of(found, request)

    def _require_files(self, request: Request) -> str:
        """The policy's name. Raises Refusal if it is unknown, or has nothing on disk."""
        policy_id = request.params["id"]
        if policy_id not in self._live.policies:
            raise Refusal("no_route", f"there is no policy {policy_id!r:.80}")
        if self._live.store(policy_id).in_memory:
            raise Refusal("no_route", "this collector keeps nothing on disk")
        return policy_id

    async def _change(self, request: Request, change: Callable[[WeightFolder], T]) -> T:
        """Run a change in the thread for weights, because it waits for the disk. Raises Refusal."""
        policy_id = self._require_files(request)
        async with self._one_at_a_time:
            request.caller.require_live(time.time())  # it may have waited for the thread
            try:
                return await self._live.ask(policy_id, change)
            except GenerationConflict as error:
                raise Refusal("conflict", str(error)) from error
            except PolicyPinned as error:
                raise Refusal("pinned", str(error)) from error
            except WeightsNotFound as error:
                raise Refusal("not_found", str(error)) from error
            except (StorageError, ValueError, TypeError, KeyError, OverflowError) as error:
                if isinstance(error.__cause__, BlockingIOError):
                    raise Refusal("busy", str(error), retry_after=2.0) from error
                if isinstance(error.__cause__, OSError):
                    raise _disk_full(error.__cause__) from error
                raise Refusal("invalid", str(error), _path_of(str(error))) from error
            except OSError as error:
                raise _disk_full(error) from error

    def _tell(self, event: str, request: Request, now: Live, **more: str | int | None) -> Response:
        self._audit(event, request, now, **more)
        served = self._live.generation(request.params["id"]) >= now.generation
        reply = wire.NowLive(
            version=now.version,
            generation=now.generation,
            served=served,
            why=None if served else self._live.standing(request.params["id"]).why,
        )
        return Response.of(reply, request, 201)

    def _audit(self, event: str, request: Request, now: Live, **more: str | int | None) -> None:
        name, token = request.params["id"], request.caller.token_id
        audit(event, policy=name, version=now.version, by=token, **more)


def _publish(store: WeightFolder, message: wire.Publish) -> Live:
    for field in ("spec", "filter_state", "metrics"):  # before other code searches them
        if (document := getattr(message, field)) is not None:
            plain_document(document, field)
    digest = store.add_candidate(
        decode_weights(message.weights, message.sha256, "weights"),
        spec=message.spec,
        metrics=message.metrics,
        lineage=message.lineage,
        filter_state=message.filter_state,
        checkpoint=message.checkpoint,
        number=message.version,
    )
    return store.publish_as(digest, message.version)


def _resume(store: WeightFolder) -> tuple[Pin | None, Live]:
    pin, now = store.resume(), store.live()
    if now is None:
        raise WeightsNotFound("nothing is live any more")
    return pin, now


def _serving(store: WeightFolder, own: Served) -> wire.Serving:
    """What is live, and what each collector serves, including this one if it cannot register."""
    now = store.live()
    registered = [
        *(
            one
            for one in store.served.registered(time.time())
            if one.collector_id != own.collector_id
        ),
        own,
    ]
    return wire.Serving(
        live=None if now is None else wire.NowLive(version=now.version, generation=now.generation),
        pinned=None if now is None or now.pinned is None else now.pinned.to_json(),
        restored=store.restored,
        collectors=[record.to_json() for record in registered],
    )


def _versions(store: WeightFolder) -> wire.Versions:
    live = store.live()
    return wire.Versions(
        live=None
        if live is None
        else wire.NowLive(version=live.version, generation=live.generation),
        next=store.next_version,
        versions=described(store)[0],
    )


def _path_of(text: str) -> str | None:
    """The field of a publication with which an error's text begins."""
    place = text.partition(": ")[0].replace(" ", "_")
    return f"$.{place}" if re.split(r"[.\[]", place)[0] in _FIELDS else None


def _disk_full(error: OSError) -> Refusal:
    """The refusal of a publication when the disk is full. Raises any other error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return Refusal("disk_full", "the disk is full: nothing is published", retry_after=2.0)


log = logging.getLogger("headrace.publication")

MAX_WAIT_SECONDS = 60.0
_NUMBER = re.compile(r"[0-9]{1,16}")
_WAIT = re.compile(r"\bwait=(\d{1,4})\b")


class WeightDownloads:
    """The route for weights, over the live policies that the collector follows."""

    def __init__(self, live: LivePolicies) -> None:
        self._live = live
        self._packed: dict[str, tuple[str, bytes]] = {}

    async def weights(self, request: Request) -> Response:
        policy_id = request.params["id"]
        if policy_id not in self._live.policies:
            raise Refusal("no_route", f"there is no policy {policy_id!r}")
        wanted = parse_qs(request.query).get("version")
        if wanted is not None:
            return await self._version(policy_id, wanted[0])
        await self._live.look([policy_id], WEIGHTS_SECONDS)
        known = request.headers.get(b"if-none-match", b"").decode("latin-1")
        self._live.note_seen(policy_id, known, request.caller.token_id)
        if known and known == self._live.etag(policy_id):
            await self._wait(policy_id, known, request)
            request.caller.require_live(time.time())
        etag = self._live.etag(policy_id)
        if etag is None:
            raise self._live.nothing_served(policy_id)
        headers = ((b"etag", etag.encode()),)
        if etag == known:
            return Response(304, headers=headers)
        return Response(200, self._body(policy_id, etag), MSGPACK, headers)

    async def _wait(self, policy_id: str, known: str, request: Request) -> None:
        """Wait for another generation, as long as the client prefers."""
        found = _WAIT.search(request.headers.get(b"prefer", b"").decode("latin-1"))
        seconds = min(float(found[1]), MAX_WAIT_SECONDS) if found else 0.0
        try:
            async with asyncio.timeout(seconds):
                while self._live.etag(policy_id) == known and not self._live.closing:
                    await self._live.changed(policy_id)
        except TimeoutError:
            return

    def _body(self, policy_id: str, etag: str) -> bytes:
        """The answer with the live version; packed once per generation for all clients."""
        packed = self._packed.get(policy_id)
        if packed is None or packed[0] != etag:
            live = self._live.published(policy_id)
            if live is None:
                raise self._live.nothing_served(policy_id)
            packed = self._packed[policy_id] = (etag, msgspec.msgpack.encode(live))
        return packed[1]

    async def _version(self, policy_id: str, text: str) -> Response:
        """The answer with a version by its number, live or not."""
        number = int(text) if _NUMBER.fullmatch(text) else 0
        try:
            manifest, weights = await self._live.version_of(policy_id, number)
        except WeightsNotFound as error:
            text = f"policy {policy_id!r} has no version {text[:20]!r}"
            raise Refusal("not_found", text) from error
        except (StorageError, OSError) as error:  # its text contains paths
            log.error("policy %s: version %d cannot be sent: %s", policy_id, number, error)
            raise Refusal("not_found", f"version {number} cannot be read: see the log") from error
        body = msgspec.msgpack.encode(Published(manifest.to_json(), -1, weights))
        return Response(200, body, MSGPACK)
