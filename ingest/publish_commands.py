"""Commands about what is live, under a root or through a collector elsewhere (`--url`).

`publish` itself stands with the gate, in `policy.commands`; the front door joins it to `publisher`
and `audited` here, because nothing in policy knows the edge.
"""

# ruff: noqa: PLC0415 - every import inside a function here is a command's lazy door

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage import commands as at_rest
from storage.command_options import ROOT, Ca, Json, PolicyId, Root, Token, Url

if TYPE_CHECKING:
    from ingest.wire import NowLive
    from storage.weights import WeightStore


@contextlib.contextmanager
def publisher(
    url: str, token: str | None, ca: Path | None
) -> Iterator[Callable[[WeightStore, str], NowLive]]:
    """What makes a candidate live through the collector at `url`."""
    from ingest.publisher import Publisher

    with Publisher(url, token=token, ca=ca) as found:
        yield found.publish_candidate


def audited(event: str, **fields: Any) -> None:
    """An audit line on stderr for what was done under a root, as a collector writes it."""
    from ingest.admission import audit
    from ingest.logs import configure

    configure()
    audit(event, **fields)


def rollback(
    to: Annotated[
        int | None, typer.Option(help="A version; default: what was live before.")
    ] = None,
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Make an earlier version's weights live again, as a new version."""
    from ingest.publisher import Publisher
    from storage import console
    from storage.weights import WeightStore

    now: Any
    if url is None:
        now = WeightStore(root, policy_id).rollback(to)
        audited("rolled_back", policy=policy_id, version=now.version, by="command line", to=to)
    else:
        with Publisher(url, token=token, ca=ca) as elsewhere:
            now = elsewhere.rollback(policy_id, to)
    document = {"policy_id": policy_id, "version": now.version, "generation": now.generation}
    if as_json:
        return console.line(document)
    return print(f"Version {now.version} of {policy_id} is live, with the weights of before.")


def versions(
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    url: Url = None,
    token: Token = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """List versions, what is live, and candidates; of a collector: versions alone."""
    if url is None:
        return at_rest.versions(root, policy_id, as_json)
    from ingest.publisher import Publisher
    from storage import console, results

    with Publisher(url, token=token, ca=ca) as elsewhere:
        found = elsewhere.versions(policy_id)
    live = found.live
    document = {
        "policy_id": policy_id,
        "live": None if live is None else {"version": live.version, "generation": live.generation},
        "versions": found.versions,
        "candidates": [],
    }
    return console.line(document) if as_json else results.versions(document)
