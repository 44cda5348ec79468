"""Published weights over HTTP: conditional requests, and a long poll that answers at once.

`GET /v1/policies/{id}/weights` answers msgpack `{manifest, generation, weights, signature}` with
an `ETag` of store, generation and version. `If-None-Match` with `Prefer: wait=25` holds the request
until another generation is live, or so many seconds passed (304).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from urllib.parse import parse_qs

import msgspec

from ingest.collector.live_policies import WEIGHTS_SECONDS, LivePolicies
from ingest.protocol.errors import Refusal
from ingest.protocol.messages import MSGPACK
from ingest.protocol.weights import Published, no_version
from ingest.web.asgi import Request, Response
from storage.errors import StorageError, WeightsNotFound

log = logging.getLogger("headrace.publication")

MAX_WAIT_SECONDS = 60.0
_NUMBER = re.compile(r"[0-9]{1,16}")
_WAIT = re.compile(r"\bwait=(\d{1,4})\b")


class Publication:
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
        await self._live.look(WEIGHTS_SECONDS)
        known = request.headers.get(b"if-none-match", b"").decode("latin-1")
        self._live.note_seen(policy_id, known)
        if known and known == self._live.etag(policy_id):
            await self._wait(policy_id, known, request)
            request.caller.require_live(time.time())
        etag = self._live.etag(policy_id)
        if etag is None:
            raise no_version(policy_id)
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
        """The live version's answer; packed once a generation, however many clients ask."""
        packed = self._packed.get(policy_id)
        if packed is None or packed[0] != etag:
            live = self._live.published(policy_id)
            if live is None:
                raise no_version(policy_id)
            packed = self._packed[policy_id] = (etag, msgspec.msgpack.encode(live))
        return packed[1]

    async def _version(self, policy_id: str, text: str) -> Response:
        """One version by its number, whatever is live."""
        number = int(text) if _NUMBER.fullmatch(text) else 0
        try:
            manifest, weights = await self._live.version_of(policy_id, number)
        except WeightsNotFound as error:
            text = f"policy {policy_id!r} has no version {text[:20]!r}"
            raise Refusal("not_found", text) from error
        except (StorageError, OSError) as error:  # its text names files of ours
            log.error("policy %s: version %d cannot be sent: %s", policy_id, number, error)
            raise Refusal("not_found", f"version {number} cannot be read: see the log") from error
        body = msgspec.msgpack.encode(Published(manifest.to_json(), -1, weights))
        return Response(200, body, MSGPACK)
