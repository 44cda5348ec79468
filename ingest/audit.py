"""The journal's side of `verify` and `ls`: what it says was accepted, and where the steps are.

    with journal_account(root) as account:     # a stopped collector is kept out meanwhile
        account.accepted, account.open_steps

A collector that runs is asked for its ledger. Else the journal's files are copied and the copy is
replayed, exactly as a collector would at its start: nothing of the original changes, whatever it
holds.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from ingest import wire
from ingest.ledger import damage_texts
from ingest.live_address import LiveAddress
from ingest.recovery import Recovered, recover
from ingest.restoring import notice_restore
from ingest.sealed import Sealed
from ingest.stores import ShardFolder
from ingest.transport import Delivery, Transport
from storage.errors import JournalLocked
from storage.files import FileLock
from storage.journal import Plan, ShardRecord, SqliteJournal
from storage.journal_damage import past_damage
from storage.journal_database import DATABASE
from storage.maintenance import JournalAccount
from storage.policy_files import load_declarations

LEDGER_SECONDS = 60.0
_FILES = (DATABASE, f"{DATABASE}-wal", "high-water")


@contextlib.contextmanager
def journal_account(
    root: Path, *, token: str | None = None, ca: Path | None = None
) -> Iterator[JournalAccount | None]:
    """The account of the journal under `root`, None when there is none.

    Holds the collector's lock until the block ends; a collector that runs on it is asked for its
    ledger instead (with `token`, scope admin, if it has tokens; `ca` is what its certificate is
    held against). Raises JournalLocked, naming the process, when that one cannot be asked: an
    address that nothing proves to be its own is not; Refusal, CollectorUnavailable, OSError.
    """
    directory = root / "journal"
    if not (directory / DATABASE).exists():
        yield None
        return
    lock = FileLock(directory / "lock")
    if not lock.acquire(blocking=False):
        holder = f"process {lock.holder()} has the journal under {root}"
        account = _asked(directory, holder, token, ca)
        # a start keeps no folder of rows lost or damaged inside: one told twice is better than none
        yield replace(account, damage=(*_past(directory), *account.damage))
        return
    try:
        yield _account(root, directory)
    finally:
        lock.release()


def _asked(directory: Path, holder: str, token: str | None, ca: Path | None) -> JournalAccount:
    """What the collector that has the journal says, and only that one."""
    live = LiveAddress.of(directory)
    if live is None:
        raise JournalLocked(
            f"{holder}, and it cannot be proven where that serves: expected a collector that runs "
            "on this machine and in this network, as the same user, or nobody"
        )
    with live:
        if token is not None and not live.private():
            raise JournalLocked(
                f"{holder} and serves {live.address} in clear text: the token is not sent; "
                "expected TLS, or an address that is loopback"
            )
        account = live_account(live, token, ca)
        if not live.holds():
            raise JournalLocked(f"{holder} and ended while it was asked: try again")
        return account


def live_account(
    live: LiveAddress, token: str | None = None, ca: Path | None = None
) -> JournalAccount:
    """What a running collector says at one moment. Raises Refusal, CollectorUnavailable."""

    def proven() -> str:
        if token is None or not live.holds():
            raise JournalLocked(f"the collector of {live.address} has ended")
        return token

    sent = None if token is None else proven  # asked for before each request
    transport = Transport(live.address, token=sent, ca=ca, timeout=LEDGER_SECONDS)
    try:
        told = Delivery(transport, "GET", "/v1/ledger").run(wire.Ledger)
        return JournalAccount(
            collector_id=told.collector_id,
            accepted=told.accepted,
            records=tuple(_records(transport)),
            plans={_plan(plan): plan.steps for plan in told.plans},
            next_ordinals=told.next_ordinals,
            waiting_steps=told.waiting_steps,
            open_steps=told.open_steps,
            open_episodes=told.open_episodes,
            damage=tuple(told.damage),
            live=True,
        )
    finally:
        transport.close()


def _records(transport: Transport) -> Iterator[ShardRecord]:
    after: int | None = -1
    while after is not None:
        page = Delivery(transport, "GET", f"/v1/ledger/records?after={after}").run(wire.LedgerPage)
        for record in page.records:
            yield ShardRecord(**msgspec.structs.asdict(record))
        after = page.last


def _plan(plan: wire.LedgerPlan) -> Plan:
    return Plan(plan.plan_id, plan.stream, "", plan.first, plan.last, b"")


def _account(root: Path, directory: Path) -> JournalAccount:
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        for name in _FILES:
            if (directory / name).exists():
                shutil.copyfile(directory / name, Path(folder) / name)
        past = _past(directory)
        journal = SqliteJournal.open(Path(folder))
        try:
            policies = load_declarations(root)
            shards = ShardFolder(root / "shards")
            notice_restore(journal, policies, shards, received=time.time_ns() // 1000)
            found = recover(journal, policies)
            return _told(journal, found, past)
        finally:
            journal.close()


def _told(journal: SqliteJournal, found: Recovered, past: tuple[str, ...]) -> JournalAccount:
    episodes = [*found.assembler.episodes.values(), *found.assembler.closing.values()]
    return JournalAccount(
        collector_id=found.damage.previous_collector_id or journal.collector_id,
        accepted=found.assembler.steps,
        records=tuple(journal.shards()),
        plans={plan: _steps(parts) for plan, parts in found.planned},
        next_ordinals=journal.streams(),
        waiting_steps=_steps(found.waiting),
        open_steps=sum(len(episode.rewards) for episode in episodes),
        open_episodes=dict(Counter(episode.started.policy_id for episode in episodes)),
        damage=(*past, *damage_texts(found.damage)),
    )


def _past(directory: Path) -> tuple[str, ...]:
    return tuple(f"{kept.name}: {text}" for kept, text in past_damage(directory))


def _steps(sealed: list[Sealed]) -> int:
    parts = (item.part for item in sealed if not item.stored)
    return sum(part.steps for part in parts if part is not None)
