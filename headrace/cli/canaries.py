"""Commands about a canary: `canary` and `promote`; `publish --canary` starts one here."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import ROOT, AdminToken, Ca, Json, PolicyId, Root
from headrace.cli.publishing import audited
from headrace.cli.roots import require_root
from headrace.cli.serving import Expected, WaitFor, Where, report_served
from policy.judging.settings import CanarySettings
from storage.wording import counted

if TYPE_CHECKING:
    from policy.data.freeze import Frozen

CANNOT_TELL_EXIT = 4
STATUSES = {"better": 0, "worse": 1}


def share_of(text: str) -> float:
    """Parse a share of the episodes: "10%" or "0.1". Raises ValueError."""
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise ValueError(f"--canary: expected a share as 10% or 0.1, got {text!r:.40}")
    return share


def size_of(document: Mapping[str, Any]) -> str:
    """The number of episodes that a verdict needs, and of which arm, as part of a sentence."""
    needed = document.get("needed")
    if needed is None:
        return "too few episodes to estimate how many a verdict takes"
    return (
        f"a verdict takes about {counted(needed, 'new episode')}, "
        f"{needed * document['share']:,.0f} of them "
        f"the canary's, if the mean returns differ by {document['effect']:.3g}, a tenth of the "
        "recent mean"
    )


def start(
    root: Root,
    policy_id: str,
    candidate: str,
    share: str,
    waiting: WaitFor,
    *,
    frozen: Frozen | None = None,
    as_json: bool,
) -> None:
    """Start a canary, and print about how many episodes a verdict needs.

    With a frozen data set it is started once, so that a late retry does not start it again.
    """
    from policy.data.run_once import once
    from policy.judging.canary import start_canary

    def work() -> dict[str, Any]:
        return start_canary(root, policy_id, candidate, share_of(share))

    key = {"policy_id": policy_id, "candidate": candidate, "share": share}
    document: dict[str, Any] = work() if frozen is None else once(frozen, "canary", key, work)
    version = document["canary"]
    details = {"canary": version, "share": document["share"], "by": "command line"}
    acts = f"version {version} acts in {document['share']:.3g} of the episodes"
    if document["started"] and not document.get("unchanged"):
        audited("canary_started", policy=policy_id, version=document["version"], **details)
    else:
        acts += ", as before"
    note = f", and {acts}; {size_of(document)}"
    where = Where(root=root, policy_id=policy_id)
    report_served(document, where, waiting, note=note, as_json=as_json)


def canary(
    *,
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    settings: CanarySettings,
    expected: Expected,
    token: AdminToken = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Judge the open canary against the live version, by its own episodes.

    May be repeated at any time. Exit status 1: worse; 4: cannot tell, or too young: `state` of
    --json tells these apart.
    """
    require_root(root, policy_id)
    from headrace.output import console, results
    from policy.judging.canary import judge_canary
    from storage.weights.store import WeightFolder

    expected.of(WeightFolder(root, policy_id))
    found = judge_canary(root, policy_id, settings)
    if found["verdict"] not in STATUSES:
        found["journal"] = _in_journal(root, policy_id, token, ca)
    if as_json:
        console.line(found)
    else:
        results.arms(found)
    _exit(found)


def _in_journal(root: Root, policy_id: str, token: str | None, ca: Path | None) -> dict[str, Any]:
    """Number of episodes that are open in the journal; None, and `why`, if it is unknown."""
    from ingest.protocol.errors import IngestError
    from ingest.verification import journal_account
    from storage.errors import StorageError

    try:
        account = journal_account(root, token=token, ca=ca)
    except (IngestError, StorageError, OSError) as error:  # it is only a hint
        return {"open_episodes": None, "why": str(error)}
    return {"open_episodes": account.open_episodes.get(policy_id, 0) if account else 0, "why": ""}


def promote(
    *,
    root: Root = ROOT,
    policy_id: PolicyId = "default",
    gate: Annotated[bool, "Promote only if its episodes show that it is better."] = True,
    settings: CanarySettings,
    expected: Expected,
    waiting: WaitFor,
    as_json: Json = False,
) -> None:
    """Make the canary live in all episodes; `rollback` ends it instead.

    With --candidate, a repeated command changes nothing. Exit status 1: worse; 4: cannot tell; 5:
    wanted, but not served in time by a registered collector.
    """
    require_root(root, policy_id)
    from headrace.output import console
    from policy.inference.weight_store import WeightStore
    from policy.judging.canary import promote as run

    where, store = Where(root=root, policy_id=policy_id), WeightStore(root, policy_id)
    live = store.live()
    if expected.candidate is not None and live is not None and live.canary_version is None:
        store.expect(expected.candidate, None)
        document: dict[str, Any] = {"policy_id": policy_id, "promoted": True, "unchanged": True}
        document |= {"version": live.version, "generation": live.generation}
        note = ", as before"
        return report_served(document, where, waiting, note=note, as_json=as_json)
    generation = expected.of(store)
    document = run(root, policy_id, settings, gated=gate, expected_generation=generation)
    if not document["promoted"]:
        for reason in document["reasons"]:
            print(f"{document['verdict']}: {reason}", file=sys.stderr)
        if as_json:
            console.line(document)
        _exit(document)
    if document["note"]:
        print(f"note: {document['note']}", file=sys.stderr)
    audited("promoted", policy=policy_id, version=document["version"], by="command line")
    judged = f"{document['verdict']}, by {counted(document['episodes'], 'episode')}"
    without = f"without a gate; its verdict was: {document['verdict']}"
    note = f" ({judged if gate else without})"
    return report_served(document, where, waiting, note=note, as_json=as_json)


def _exit(found: dict[str, Any]) -> None:
    status = STATUSES.get(found["verdict"], CANNOT_TELL_EXIT)
    if status:
        raise typer.Exit(status)
