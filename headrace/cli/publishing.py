"""Commands about what is live, under a root or through a collector elsewhere (`--url`).

`publish` itself stands with the gate, in `headrace.cli.learning`; `headrace.__main__` joins it to
`publisher` and `audited` here, because nothing in policy knows the edge.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import commands as at_rest
from headrace.cli.options import ROOT, Ca, Json, PolicyId, Root, Token, Url

if TYPE_CHECKING:
    from ingest.protocol.messages import NowLive
    from policy.inference.weight_store import WeightStore


@contextlib.contextmanager
def publisher(
    url: str, token: str | None, ca: Path | None
) -> Iterator[Callable[[WeightStore, str], NowLive]]:
    """What makes a candidate live through the collector at `url`."""
    from ingest.client.publisher import Publisher

    with Publisher(url, token=token, ca=ca) as found:
        yield found.publish_candidate


def audited(event: str, **fields: Any) -> None:
    """An audit line on stderr for what was done under a root, as a collector writes it."""
    from ingest.access.admission import audit
    from ingest.server.logs import configure

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
    from headrace.output import console
    from ingest.client.publisher import Publisher
    from policy.inference.weight_store import WeightStore

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
    from headrace.output import console, results
    from ingest.client.publisher import Publisher

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
