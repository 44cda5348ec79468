"""The publishing side of a collector elsewhere: versions, publish, roll back.

    with Publisher("https://collector.example.com", token=token) as publisher:
        publisher.publish_candidate(WeightStore(root, "default"), digest)

The token has the scope `weights:publish`. The publisher proposes the number that comes next, and
another one when somebody else took it; a request whose answer was lost is sent again unchanged, and
has the same answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec

from ingest.client.admin_session import admin_session
from ingest.client.transport import Delivery, HttpSession, Token, Transport
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.weights.manifest import WEIGHTS_FILE, encode_weights, sha256
from storage.weights.store import WeightFolder

TRIES = 8
"""So often another publisher may be faster."""

_MSGPACK = {"Content-Type": wire.MSGPACK}


class Publisher:
    """Publishes through one collector. `timeout` is in seconds, for each request in all.

    A given `session` (of `requests`) is used for everything, with its proxies, certificates and
    headers, and stays the caller's. Without one nothing of the environment is used.

    Every call raises Refusal when the collector says no, CollectorUnavailable when it does not
    answer.
    """

    def __init__(
        self,
        address: str,
        *,
        session: HttpSession | None = None,
        token: Token = None,
        ca: str | Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        if ca is not None and session is not None:
            raise ValueError("ca: expected none with a session, which has its own verify")
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
        self._transport.close()
        if self._own is not None:
            self._own.close()

    def versions(self, policy_id: str = "default") -> wire.Versions:
        """What is there, what is live, and the number that comes next."""
        return Delivery(self._transport, "GET", _path(policy_id, "versions")).run(wire.Versions)

    def _publish(self, policy_id: str, message: wire.Publish) -> wire.NowLive:
        """Make weights live under the next number; the one in `message` is not looked at.

        Raises Refusal (conflict) when others were faster each time, or when it was published and
        somebody followed it before its answer came.
        """
        number, tries = self.versions(policy_id).next, 0
        while True:
            tries += 1
            body = msgspec.msgpack.encode(msgspec.structs.replace(message, version=number))
            path = _path(policy_id, "versions")
            delivery = Delivery(self._transport, "POST", path, body, _MSGPACK)
            try:
                return delivery.run(wire.NowLive)
            except Refusal as refusal:
                if refusal.code != "conflict" or tries == TRIES:
                    raise
                there = self.versions(policy_id)
                if delivery.maybe_applied and _holds(there, number, message.sha256):
                    text = f"version {number} was published, and another one is live since"
                    raise Refusal("conflict", text) from refusal
                number = there.next

    def publish_candidate(self, store: WeightFolder, digest: str) -> wire.NowLive:
        """Publish a candidate of a store here. Raises WeightsNotFound, WeightsDamaged."""
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
        """What is live, and what each registered collector serves."""
        return Delivery(self._transport, "GET", _path(policy_id, "served")).run(wire.Serving)

    def resume(self, policy_id: str = "default") -> wire.NowLive:
        """End what a rollback pinned. What is live stays as it is."""
        body = msgspec.msgpack.encode(wire.Resume())
        path = _path(policy_id, "resume")
        return Delivery(self._transport, "POST", path, body, _MSGPACK).run(wire.NowLive)

    def rollback(
        self, policy_id: str = "default", to: int | None = None, *, why: str = ""
    ) -> wire.NowLive:
        """Go back to version `to`, or to the one before that was served, and pin the policy to it.

        It holds for what is live now: a retry, or somebody else's change in between, is a conflict
        and not a second rollback.
        """
        live = self.versions(policy_id).live
        if live is None:
            raise Refusal("no_version", f"nothing is live for policy {policy_id!r}")
        body = msgspec.msgpack.encode(wire.Rollback(generation=live.generation, to=to, why=why))
        path = _path(policy_id, "rollback")
        return Delivery(self._transport, "POST", path, body, _MSGPACK).run(wire.NowLive)


def _path(policy_id: str, what: str) -> str:
    return f"/v1/policies/{quote(policy_id, safe='')}/{what}"


def _holds(there: wire.Versions, number: int, digest: str) -> bool:
    """Whether version `number` has these weights."""
    known: list[dict[str, Any]] = [one for one in there.versions if one["version"] == number]
    return any(one["digests"].get(WEIGHTS_FILE) == digest for one in known)
