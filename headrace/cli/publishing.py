"""The commands `rollback`, `resume` and `versions`, under a root or through a collector (`--url`).

`publish` is in `headrace.cli.learning`, next to the gate.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import getpass
import os
import socket
import time
from typing import TYPE_CHECKING, Annotated, Any

from headrace.cli.options import ROOT, Json, PolicyId, Root
from headrace.cli.roots import require_root
from headrace.cli.serving import Expected, WaitFor, Where, report_served

if TYPE_CHECKING:
    from storage.weights.manifest import Live

Why = Annotated[
    str,
    "Reason, kept with the decision and shown while the policy is pinned; default: what "
    "was done. It cannot be added later.",
]


def audited(event: str, **fields: Any) -> None:
    """Write an audit line to stderr about a change under a root, as a collector does."""
    from ingest.access.admission import audit
    from ingest.server.logs import configure

    configure()
    audit(event, **fields)


def rollback(
    *,
    to: Annotated[
        int | None, "Version to return to, not live; default: the previous one that was served."
    ] = None,
    why: Why = "",
    where: Where,
    expected: Expected,
    waiting: WaitFor,
    as_json: Json = False,
) -> None:
    """Make an earlier version's weights live again, as a new version, and pin the policy to it.

    While a canary is on, without --to: the canary ends, and what is live acts everywhere.

    No trainer or job publishes before `headrace resume`. With --expect-generation and --why, a
    repeated command changes nothing. Exit status 5: it is wanted, and a registered collector did
    not serve it in time.
    """
    from policy.inference.weight_store import WeightStore

    root, policy_id = where.root, where.policy_id
    now: Any
    target: int | None = None
    if where.url is None:
        require_root(root, policy_id)
    store = WeightStore(root, policy_id)
    expected.require_none(where.url)
    live = store.live() if where.url is None else None
    if live is not None and _rolled_back(live, expected, why):
        document = {"policy_id": policy_id, "version": live.version, "unchanged": True}
        document |= {"generation": live.generation}
        note = "; it was rolled back already"
        return report_served(document, where, waiting, note=note, as_json=as_json)
    canary = to is None and live is not None and live.canary_version is not None
    if where.url is None:
        generation = expected.of(store)
        now = store.rollback(to, expected_generation=generation, by=person(), why=why)
        target = now.version if canary else store.manifest(now.version).copy_of
        details = {"to": target, "pinned_by": now.pinned.by, "why": now.pinned.why}
        audited("rolled_back", policy=policy_id, version=now.version, by="command line", **details)
    else:
        with where.publisher() as elsewhere:
            before = elsewhere.versions(policy_id).live
            target, now = to, elsewhere.rollback(policy_id, to, why=why)
        canary = before is not None and now.version == before.version  # the live one stays
    document = {"policy_id": policy_id, "version": now.version, "generation": now.generation}
    weights = "earlier weights" if target is None else f"the weights of version {target}"
    ended = "; the canary has ended" if canary else f", with {weights}"
    note = f"{ended}; pinned until `headrace resume`"
    return report_served(document, where, waiting, note=note, as_json=as_json)


def _rolled_back(live: Live, expected: Expected, why: str) -> bool:
    """Whether this rollback was done before: the next generation is pinned for the same reason."""
    was = expected.expect_generation
    known = was is not None and live.generation == was + 1
    return bool(known and why and live.pinned is not None and live.pinned.why == why)


def person() -> str:
    """The user who runs the command, if the system knows."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in a container
        name = f"uid {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def pause(
    why: Why = "",
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    *,
    expected: Expected,
    as_json: Json = False,
) -> None:
    """Pin the live version: trainers publish nothing until `headrace resume`.

    A policy that is pinned already keeps its pin and that pin's reason.
    """
    require_root(root, policy_id)
    from headrace.output import console
    from policy.inference.weight_store import WeightStore

    store = WeightStore(root, policy_id)
    pin, new = store.pause(by=person(), why=why, expected_generation=expected.of(store))
    if new:
        audited("paused", policy=policy_id, by="command line", pinned_by=pin.by, why=pin.why)
    if as_json:
        document = {"policy_id": policy_id, "pinned": pin.to_json(), "unchanged": not new}
        return console.line(document)
    if new:
        return print(f"{policy_id} is pinned by {pin.by}: {pin.why}.")
    ignored = f" The reason {why!r} is not recorded." if why else ""
    return print(f"{policy_id} stays pinned, as before, by {pin.by}: {pin.why}.{ignored}")


def resume(*, where: Where, expected: Expected, as_json: Json = False) -> None:
    """End a pin: trainers and jobs may publish the policy again."""
    from headrace.output import console
    from policy.inference.weight_store import WeightStore

    root, policy_id = where.root, where.policy_id
    pin: dict[str, Any] | None
    expected.require_none(where.url)
    if where.url is None:
        require_root(root, policy_id)
        store = WeightStore(root, policy_id)
        ended = store.resume(expected_generation=expected.of(store))
        pin = None if ended is None else ended.to_json()
        if pin is not None:
            audited("resumed", policy=policy_id, by="command line", pinned_by=pin["by"])
    else:
        with where.publisher() as elsewhere:
            pin = elsewhere.served(policy_id).pinned
            elsewhere.resume(policy_id)
    if as_json:
        console.line({"policy_id": policy_id, "ended": pin})
        return
    if pin is None:
        print(f"{policy_id} was not pinned.")
    else:
        print(f"{policy_id} is not pinned any more. {pin['by']} had pinned it: {pin['why']}.")
    live = None if where.url is not None else WeightStore(root, policy_id).live()
    if live is not None and live.hold is not None:
        print(f"Its canary goes on: {live.hold.why}; `headrace promote` or `rollback` ends that.")


def versions(*, where: Where, as_json: Json = False) -> None:
    """List versions, which are wanted and served, and candidates (not with --url)."""
    from headrace.output import console, results

    at_rest = where.url is None
    document = (_versions_at_rest if at_rest else _versions_elsewhere)(where)
    return console.line(document) if as_json else results.versions(document)


def _versions_at_rest(where: Where) -> dict[str, Any]:
    root, policy_id = where.root, where.policy_id
    require_root(root, policy_id)
    from storage.errors import StorageError
    from storage.weights.off_chain import described
    from storage.weights.store import WeightFolder

    store = WeightFolder(root, policy_id)
    live = store.live()
    found, damaged = described(store)
    candidates, unreadable = [], {}
    for digest in store.candidates():
        try:
            known = {"digest": digest, "added": store.added(digest)}
            candidates.append({**known, **store.candidate(digest).to_json()})
        except (StorageError, OSError) as error:
            unreadable[digest] = str(error)
    return {
        "policy_id": policy_id,
        "live": None if live is None else {"pinned": None, **live.to_json()},
        "served": [record.to_json() for record in store.served.registered(time.time())],
        "restored": store.restored,
        "pruned": len(store.pruned()),
        "versions": found,
        "damaged": {str(version): why for version, why in damaged.items()},
        "damaged_candidates": unreadable,
        "candidates": candidates,
        "latest": store.latest(),
    }


def _versions_elsewhere(where: Where) -> dict[str, Any]:
    policy_id = where.policy_id
    with where.publisher() as elsewhere:
        found, serving = elsewhere.versions(policy_id), elsewhere.served(policy_id)
    live = found.live
    return {
        "policy_id": policy_id,
        "live": None
        if live is None
        else {"version": live.version, "generation": live.generation, "pinned": serving.pinned},
        "served": serving.collectors,
        "restored": serving.restored,
        "versions": found.versions,
        "candidates": [],
        "latest": None,
    }
