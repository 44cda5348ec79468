"""Erasing from a root: the application of a plan to journal and shards.

    erase(root, plan_erasure(root, account, marks, key).plan, key, by="me", why="request 17")

The journal comes first, by its running collector or alone: what it held of the episodes goes to
shards, and is erased there with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from ingest.collector.collector import Collector
from ingest.collector.stores import stores_under
from ingest.delivery.transport import Delivery
from ingest.erasure.journal import WAIT_SECONDS
from ingest.erasure.journal import erase as erase_from
from ingest.protocol import messages as wire
from ingest.verification import called, journal_account, journal_of, live_collector
from storage.maintenance import plans
from storage.maintenance.plans import MaintenancePlan
from storage.maintenance.removal import applied_erasures, plan_erasure
from storage.system.files import FileLock
from storage.verify.audit import OnProgress, no_progress


def erase(
    root: Path,
    wanted: MaintenancePlan,
    key: bytes,
    *,
    token: str | None = None,
    ca: Path | None = None,
    by: str,
    why: str,
    on_progress: OnProgress = no_progress,
) -> dict[str, int]:
    """Apply a plan, and plans for what was written since, until nothing is left; say what was done.

    A running collector is asked with a token of the scopes admin and erase. It can be repeated
    after any kill: `repeated` says that an earlier run has removed rows for the same tombstones.
    Raises JournalLocked, Refusal, ValueError, and the errors of a collector's start.
    """
    done = {"removed": 0, "deleted": 0, "ended": 0, "journal_rows": 0}
    marks = {*wanted.tombstones}
    done["repeated"] = any(marks <= {*plan.tombstones} for plan in applied_erasures(root))
    while True:
        found = _erase_journal(root, wanted.tombstones, token, ca)
        if found is not None:
            done["ended"] += found.ended
            done["journal_rows"] += found.rows
        applied = plans.apply(root, wanted, by=by, why=why, on_progress=on_progress)
        done["removed"] += applied.removed
        done["deleted"] += applied.deleted
        for place, text in applied.left.items():
            raise ValueError(f"erase: {place} is left as it is: {text}")
        account = journal_account(root, token=token, ca=ca)
        rest = plan_erasure(root, account, wanted.tombstones, key, all_rows=True).plan
        if not rest.steps and {*rest.tombstones} <= {*wanted.tombstones}:
            return done
        wanted = rest
        plans.save(root, wanted)


def _erase_journal(
    root: Path, marks: Iterable[str], token: str | None, ca: Path | None
) -> wire.Erased | None:
    """Erase the episodes with these tombstones from the journal under a root; None without one."""
    directory = journal_of(root)
    if directory is None:
        return None
    lock = FileLock(directory / "lock")
    if lock.acquire(blocking=False, shared=True):
        lock.release()
        return _alone(root, marks)
    holder = f"process {lock.holder()} holds the journal under {root}"
    body = wire.encode(wire.Erase(tombstones=sorted(marks)), wire.MSGPACK)
    with (
        live_collector(directory, holder, token) as live,
        called(live, token, ca, 2 * WAIT_SECONDS) as transport,
    ):
        headers = {"Content-Type": wire.MSGPACK}
        return Delivery(transport, "POST", "/v1/erase", body, headers).run(wire.Erased)


def _alone(root: Path, marks: Iterable[str]) -> wire.Erased:
    """Start a collector that nobody can reach, and stop it once it has erased."""
    stores = stores_under(root)

    async def run() -> wire.Erased:
        collector = Collector(
            stores.journal,
            stores.writer,
            stores.policies,
            root=root,
            redaction_key=stores.redaction_key,
        )
        collector.start()
        patience = 0.0  # for shards that cannot be written, as with a full disk
        try:
            found = await erase_from(collector, marks)
            patience = WAIT_SECONDS
            return found
        finally:
            await collector.drain(patience)

    return asyncio.run(run())
