"""Publishing through a collector on another machine: versions, publish, roll back.

    with Publisher("https://collector.example.com", token=token) as publisher:
        publisher.publish_candidate(WeightStore(root, "default"), digest)

The token needs the scope `weights:publish`. The publisher proposes the next number, and another one
if a different publisher took it. A request without an answer is sent again unchanged, and gets the
same answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec

from ingest.client.admin_session import admin_session
from ingest.delivery.transport import Delivery, HttpSession, TokenSource, Transport
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.weights.manifest import WEIGHTS_FILE, encode_weights, sha256
from storage.weights.store import WeightFolder

TRIES = 8
"""The number of attempts, each with a new number, if other publishers are faster."""

_MSGPACK = {"Content-Type": wire.MSGPACK}


class Publisher:
    """Publishes through one collector. `timeout` is in seconds, per request with its retries.

    A given `session` (of `requests`) is used for all requests, with its proxies, certificates and
    headers; the caller closes it. Without one the environment is ignored.

    Every call raises Refusal if the collector refuses, CollectorUnavailable if it does not answer.
    """

    def __init__(
        self,
        address: str,
        *,
        session: HttpSession | None = None,
        token: TokenSource = None,
        ca: str | Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        if ca is not None and session is not None:
            raise ValueError("ca: expected none with a session: set session.verify instead")
        self._own = admin_session(ca) if session is None else None
        self._transport = Transport(
            address, session=session or self._own, token=token, timeout=timeout
        )

    def __repr__(self) -> str:
        return f"Publisher({self._transport.address!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()
        if self._own is not None:
            self._own.close()

    def versions(self, policy_id: str = "default") -> wire.Versions:
        """The published versions, the live version, and the next number."""
        return self._request(policy_id, "versions").run(wire.Versions)

    def _publish(self, policy_id: str, message: wire.Publish) -> wire.NowLive:
        """Publish weights under the next number; the number in `message` is ignored.

        Raises Refusal (conflict) if other publishers were faster each time, or if another version
        was published after this one before its answer came.
        """
        number, tries = self.versions(policy_id).next, 0
        while True:
            tries += 1
            numbered = msgspec.structs.replace(message, version=number)
            delivery = self._request(policy_id, "versions", numbered)
            try:
                return delivery.run(wire.NowLive)
            except Refusal as refusal:
                if refusal.code != "conflict" or tries == TRIES:
                    raise
                there = self.versions(policy_id)
                if delivery.maybe_applied and _holds(there, number, message.sha256):
                    text = f"version {number} was published, but another one is live now"
                    raise Refusal("conflict", text) from refusal
                number = there.next

    def live_of(self, store: WeightFolder, digest: str) -> wire.NowLive | None:
        """The collector's live version, if it came from this candidate of a local store."""
        found = self.versions(store.policy_id)
        sources = {one.get("version"): one.get("candidate") for one in found.versions}
        if found.live is None or sources.get(found.live.version) != digest:
            return None
        return found.live

    def publish_candidate(self, store: WeightFolder, digest: str) -> wire.NowLive:
        """Publish a candidate of a local store. Raises WeightsNotFound, WeightsDamaged."""
        candidate, arrays = store.load_candidate(digest)
        weights = encode_weights(arrays)
        lineage = store.candidate_lineage(candidate.digest)
        message = wire.Publish(
            version=1,
            sha256=sha256(weights),
            weights=weights,
            spec=candidate.spec,
            filter_state=candidate.filter_state,
            metrics=candidate.metrics,
            checkpoint=candidate.checkpoint,
            lineage={stream: ranges.ranges() for stream, ranges in lineage.items()},
        )
        return self._publish(store.policy_id, message)

    def served(self, policy_id: str = "default") -> wire.Serving:
        """The live version, and the version that each registered collector serves."""
        return self._request(policy_id, "served").run(wire.Serving)

    def resume(self, policy_id: str = "default") -> wire.NowLive:
        """End the pin of a rollback. The live version does not change."""
        return self._request(policy_id, "resume", wire.Resume()).run(wire.NowLive)

    def rollback(
        self, policy_id: str = "default", to: int | None = None, *, why: str = ""
    ) -> wire.NowLive:
        """Make version `to`, or the previous one that was served, live, and pin the policy to it.

        It applies to the version that is live now: after a retry or another publisher's change it
        is a conflict, not a second rollback.
        """
        live = self.versions(policy_id).live
        if live is None:
            raise Refusal("no_version", f"nothing is live for policy {policy_id!r}")
        message = wire.Rollback(generation=live.generation, to=to, why=why)
        return self._request(policy_id, "rollback", message).run(wire.NowLive)

    def _request(
        self, policy_id: str, what: str, message: msgspec.Struct | None = None
    ) -> Delivery:
        """A request about a policy; without a message it asks."""
        path = f"/v1/policies/{quote(policy_id, safe='')}/{what}"
        if message is None:
            return Delivery(self._transport, "GET", path)
        body = msgspec.msgpack.encode(message)
        return Delivery(self._transport, "POST", path, body, _MSGPACK)


def _holds(there: wire.Versions, number: int, digest: str) -> bool:
    """Whether version `number` has these weights."""
    known: list[dict[str, Any]] = [one for one in there.versions if one["version"] == number]
    return any(one["digests"].get(WEIGHTS_FILE) == digest for one in known)
