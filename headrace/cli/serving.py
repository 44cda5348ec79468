"""Wait until a live version is served, and report which collectors do not serve it.

A version is wanted from the moment that live.json names it. It is live for clients when a collector
serves it, which the collector may refuse. Each collector registers what it serves
(`storage.weights.served`). One that cannot write under `weights/` is found by its address in the
journal's folder, and asked over HTTP.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Meta

from headrace.cli.options import ROOT, Ca, PolicyId, Root, Token
from storage.objects.opening import local_folder

if TYPE_CHECKING:
    from ingest.client.publisher import Publisher
    from storage.weights.manifest import Served
    from storage.weights.store import WeightFolder

NOT_SERVED = 5
"""The exit status if a version is wanted but was not served in time."""
ASK_SECONDS = 0.05
REFUSED_SECONDS = 3.0
"""Seconds after which a refusal is final; some refusals pass before."""

Ask = Callable[[], Sequence["Served"]]
"""A function that returns what each registered collector serves now."""


class Wait(StrEnum):
    """Which of the registered collectors must serve a version before a command ends."""

    ALL = "all"
    ANY = "any"
    NONE = "none"


WAIT_SECONDS = 35.0
"""Longer than the registration of a killed collector lasts."""


@dataclass(frozen=True, kw_only=True)
class WaitFor:
    """How long a command waits until collectors serve a version."""

    wait: Annotated[Wait, "Wait until all registered collectors serve it, any, or none."] = Wait.ALL
    wait_for: Annotated[float, "Seconds to wait; then the exit status is 5.", Meta(ge=0.0)] = (
        WAIT_SECONDS
    )


def wait_served(ask: Ask, generation: int, how: Wait, seconds: float) -> dict[str, Any]:
    """Wait until collectors serve a generation, or a later one.

    Returns `state`: "served", "no collector", "not served" or "not asked", and `collectors`: what
    each serves, and the reason if that is not the wanted version.
    """
    begin, refused_since = time.monotonic(), None
    while True:
        records = ask()
        behind = [one for one in records if one.generation < generation]
        enough = how is Wait.ANY and len(behind) < len(records)
        now = time.monotonic()
        state = "served"
        if how is Wait.NONE:
            state = "not asked"
        elif not records:
            state = "no collector"
        elif behind and not enough:
            refusing = [one for one in behind if one.wanted_generation >= generation and one.why]
            final = len(refusing) == len(behind) if how is Wait.ANY else bool(refusing)
            refused_since = (refused_since or now) if final else None
            given_up = refused_since is not None and now - refused_since >= REFUSED_SECONDS
            if not given_up and now - begin < seconds:
                time.sleep(ASK_SECONDS)
                continue
            state = "not served"
        collectors = [
            {
                "collector_id": one.collector_id,
                "version": one.version,
                "generation": one.generation,
                "why": one.why,
            }
            for one in records
        ]
        return {"state": state, "seconds": round(now - begin, 3), "collectors": collectors}


def described(version: int, generation: int, policy_id: str, served: dict[str, Any]) -> str:
    """A sentence about the version that is live in a generation, and whether it is served."""
    wanted = f"Version {version} of {policy_id} is wanted"
    collectors = served["collectors"]
    if served["state"] == "served":
        count = sum(one["generation"] >= generation for one in collectors)
        return f"Version {version} of {policy_id} is live, served by {count} of {len(collectors)}"
    if served["state"] == "no collector":
        return f"{wanted}, no collector is registered"
    if served["state"] == "not asked":
        return f"{wanted}; serving was not checked"
    behind = [
        f"collector {one['collector_id']} serves "
        f"{'nothing' if one['version'] < 0 else one['version']}"
        f" ({one['why'] or 'it has not examined this one'})"
        for one in collectors
        if one["generation"] < generation
    ]
    return f"{wanted} and NOT served: {'; '.join(behind)}"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is live when a command acts, so that a late retry changes nothing: exit status 6."""

    candidate: Annotated[
        str | None,
        "Only if the canary, or without one the live version, has this digest; else status 6.",
    ] = None
    expect_generation: Annotated[
        int | None, "Only in this generation, as in `versions --json`; else status 6."
    ] = None

    def of(self, store: WeightFolder) -> int | None:
        """The generation to act in; None for any. Raises LiveChanged."""
        return store.expect(self.candidate, self.expect_generation)

    def require_none(self, url: str | None) -> None:
        """Raise ValueError if something is expected of a collector's own versions."""
        if url is not None and self != Expected():
            raise ValueError("--url: expected neither --candidate nor --expect-generation")


@dataclass(frozen=True, kw_only=True)
class Where:
    """The weights that a command changes: those of a root, or of the collector at `url`."""

    root: Root = ROOT
    policy_id: PolicyId = "default"
    url: Annotated[
        str | None, "Address of a collector that publishes, instead of using a root's weights."
    ] = None
    token: Token = None
    ca: Ca = None

    @contextlib.contextmanager
    def asked(self) -> Iterator[Ask]:
        """Yield a function that returns what the registered collectors serve."""
        if self.url is None:
            yield asked_under(self.root, self.policy_id, self.token, self.ca)
            return
        with self.publisher() as publisher:
            yield asked_elsewhere(publisher, self.policy_id)

    def publisher(self) -> Publisher:
        """A connection to the collector at `url`."""
        from ingest.client.publisher import Publisher

        return Publisher(self.url or "", token=self.token, ca=self.ca)


def report_served(
    document: dict[str, Any],
    where: Where,
    waiting: WaitFor,
    *,
    note: str,
    as_json: bool,
) -> None:
    """Wait until the `version` and `generation` of a document are served, and print the result.

    Raises typer.Exit with NOT_SERVED if they are not.
    """
    from headrace.output import console

    with where.asked() as ask:
        served = wait_served(ask, document["generation"], waiting.wait, waiting.wait_for)
    version, generation = document["version"], document["generation"]
    text = described(version, generation, where.policy_id, served)
    failed = served["state"] == "not served"
    if as_json:
        console.line({**document, "served": served})
    elif not failed:
        print(f"{text}{note}.")
    if failed:
        print(f"headrace: {text}", file=sys.stderr)
        raise typer.Exit(NOT_SERVED)


def asked_elsewhere(publisher: Publisher, policy_id: str) -> Ask:
    """Ask the collector that publishes."""
    from storage.weights.manifest import Served

    return lambda: [
        Served.from_json(one, "collectors") for one in publisher.served(policy_id).collectors
    ]


def asked_under(root: Root, policy_id: str, token: str | None, ca: Path | None) -> Ask:
    """Read the records under a root, or ask its collector by address if it has no record."""
    from storage.weights.store import WeightFolder

    store = WeightFolder(root, policy_id)
    silent = _Silent(root, policy_id, token, ca)

    def served() -> Sequence[Served]:
        records = store.served.registered(time.time())
        unregistered = silent.record({one.collector_id for one in records})
        return [*records, *unregistered]

    return served


class _Silent:
    """The collector of a root, if it cannot write under `weights/`."""

    def __init__(self, root: Root, policy_id: str, token: str | None, ca: Path | None) -> None:
        self._folder, self._policy_id = local_folder(root), policy_id
        self._token, self._ca = token, ca
        self._id = ""

    def record(self, registered: set[str]) -> list[Served]:
        """What the collector serves: one record, or none if it is registered or not running.

        If it does not answer, it counts as serving nothing, unless any collector is registered,
        which is then assumed to be the same.
        """
        from ingest.collector.address_file import LiveAddress

        if self._id in registered:
            return []
        live = LiveAddress.of(self._folder / "journal") if self._folder else None
        if live is None:
            return []
        with contextlib.closing(live):
            token = self._token if live.private() else None
            answer = ask(live.address, "/v1/spec", token, self._ca)
        if isinstance(answer, str):
            why = f"it is not registered, and its answer was: {answer}"
            return [] if registered else [_record(live.address, {"why": why})]
        self._id = str(answer["collector_id"])
        weights = answer["policies"].get(self._policy_id, {}).get("weights")
        return [] if self._id in registered or weights is None else [_record(self._id, weights)]


def ask(address: str, path: str, token: str | None, ca: Path | None) -> dict[str, Any] | str:
    """A collector's answer, or the reason why there is none."""
    from ingest.delivery.transport import Delivery, Transport
    from ingest.protocol.errors import IngestError

    with contextlib.closing(Transport(address, token=token, ca=ca)) as transport:
        try:
            return Delivery(transport, "GET", path).run(dict[str, Any], timeout=5.0)
        except IngestError as error:
            return str(error)


def _record(collector_id: str, weights: dict[str, Any]) -> Served:
    """Convert the weights in an answer of `/v1/spec` to a record."""
    from storage.weights.manifest import Served

    nothing = {"version": -1, "generation": -1}
    served, wanted = weights.get("served") or nothing, weights.get("wanted") or nothing
    return Served(
        collector_id=collector_id,
        generation=served["generation"],
        version=served["version"],
        wanted_generation=wanted["generation"],
        wanted_version=wanted["version"],
        why=weights["why"],
        until=0,
        served=[],
        refused={},
    )
