"""The journal's part of `verify` and `ls`: what it has accepted, and where the steps are.

    account = journal_account(root)
    account.accepted, account.open_steps

A running collector is asked for its ledger. Otherwise the journal's files are copied, and the copy
is replayed as at a collector's start, so that the original never changes. A collector that starts
has to wait only while the files are copied.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from ingest.client.admin_session import admin_session
from ingest.collector.address_file import LiveAddress
from ingest.collector.adoption import require_current
from ingest.collector.journal_report import damage_texts
from ingest.collector.recovery import Recovered, recover
from ingest.delivery.transport import Delivery, Transport
from ingest.episodes.sealed_parts import Sealed, steps_of
from ingest.protocol import messages as wire
from ingest.protocol.errors import CollectorUnavailable
from storage.declarations.policy_files import load_declarations
from storage.errors import JournalLocked
from storage.experience.part_columns import parts_in
from storage.journal.database import DATABASE, past_damage
from storage.journal.records import DamageReport, Plan, ShardRecord
from storage.journal.sqlite_journal import SqliteJournal
from storage.objects.opening import Root, local_folder
from storage.shards.replacements import given_ordinals, traces
from storage.system.files import FileLock
from storage.verify.audit import (
    JournalAccount,
    OnProgress,
    Trained,
    VerifyReport,
    no_progress,
    verify,
)
from storage.verify.second_reader import SecondReader

log = logging.getLogger("headrace.verify")

LEDGER_SECONDS = 10.0
"""Seconds without a byte after which a collector cannot be asked, as one that is stopped."""
LOOKS = 3
_FILES = (DATABASE, f"{DATABASE}-wal", "high-water")


def verified(
    root: Root,
    *,
    token: str | None = None,
    ca: Path | None = None,
    quarantine: bool = False,
    second: SecondReader | None = None,
    on_progress: OnProgress = no_progress,
) -> VerifyReport:
    """The findings of `verify` under `root`, with the account of its journal.

    A collector may start meanwhile, or shards be replaced. Findings may then come from work after
    the account was made, so everything is checked again. `quarantine` prevents a start. `second`
    also reads all intact shards. Raises ValueError for `quarantine` while a collector runs, and the
    errors of `journal_account`.
    """
    if quarantine:
        return _set_aside(root, second, on_progress)
    for _ in range(LOOKS):
        before, traced = stamps(journal_of(root)), traces(root)
        trained = Trained.of(root)
        account = journal_account(root, token=token, ca=ca)
        report = verify(root, account, trained, second=second, on_progress=on_progress)
        still = account is None or account.live or stamps(journal_of(root)) == before
        if report.ok or (still and traces(root) == traced):
            break
    return report


def _set_aside(root: Root, second: SecondReader | None, on_progress: OnProgress) -> VerifyReport:
    """Run `verify` with the right to move shards; no collector can start until it is done."""

    def run(account: JournalAccount | None) -> VerifyReport:
        return verify(
            root,
            account,
            Trained.of(root),
            quarantine=True,
            second=second,
            on_progress=on_progress,
        )

    directory = journal_of(root)
    if directory is None:
        return run(None)
    lock = FileLock(directory / "lock")
    if not lock.acquire(blocking=False):
        raise ValueError(
            "--quarantine: expected a root that nothing else uses, got one that a collector or "
            "another command is using"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            _copy(directory, Path(folder))
            account = _account(root, directory, Path(folder))
        return run(account)
    finally:
        lock.release()


def journal_of(root: Root) -> Path | None:
    """The folder of the journal under `root`; None if there is none, as in a root elsewhere."""
    folder = local_folder(root)
    there = folder is not None and (folder / "journal" / DATABASE).exists()
    return folder / "journal" if folder is not None and there else None


def journal_account(
    root: Root, *, token: str | None = None, ca: Path | None = None
) -> JournalAccount | None:
    """The account of the journal under `root`, None if there is no journal.

    A running collector is asked for its ledger (with `token`, scope admin, if it has tokens; its
    certificate is checked against `ca`). Raises JournalLocked, naming the process, if that
    collector cannot be asked, also because its address cannot be proven; JournalBehind, Refusal,
    OSError.
    """
    directory = journal_of(root)
    if directory is None:
        return None
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        lock = FileLock(directory / "lock")
        if _may_look(lock):
            try:
                _copy(directory, Path(folder))
            finally:
                lock.release()
            return _account(root, directory, Path(folder))
    holder = f"process {lock.holder()} holds the journal under {root}"
    account = _asked(directory, holder, token, ca)
    # a start may not have recorded damage in a folder; reporting it twice is better than not at all
    return replace(account, damage=(*_past(directory), *account.damage))


def _may_look(lock: FileLock) -> bool:
    """Whether no collector has the journal; none can take it until the lock is released."""
    try:
        return lock.acquire(blocking=False, shared=True)
    except FileNotFoundError:  # a backup may lack it; creating it changes `stamps`
        return True


def stamps(directory: Path | None) -> list[tuple[int, int, int]]:
    """Values that change if a collector has used the journal in between."""
    found = []
    for path in [directory / name for name in _FILES] if directory else []:
        with contextlib.suppress(FileNotFoundError):  # a collector that ends deletes its log
            stat = path.stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found


def _asked(directory: Path, holder: str, token: str | None, ca: Path | None) -> JournalAccount:
    """Ask the collector that has the journal, and no other, for its account."""
    with live_collector(directory, holder, token) as live:
        account = live_account(live, token, ca)
        if not live.holds():
            raise JournalLocked(f"{holder} and ended before it answered: try again")
        return account


@contextlib.contextmanager
def live_collector(directory: Path, holder: str, token: str | None) -> Iterator[LiveAddress]:
    """The proven address of the collector that has the journal; `holder` names it in messages.

    Raises JournalLocked if there is none, or if it does not answer in the block.
    """
    live = LiveAddress.of(directory)
    if live is None:
        raise JournalLocked(
            f"{holder}, and its address cannot be verified: expected no such process, or a "
            "collector on this machine, in this network and of this user"
        )
    with closing(live):
        if token is not None and not live.private():
            raise JournalLocked(
                f"{holder} and serves {live.address} in clear text: the token is not sent; "
                "expected TLS, or an address that is loopback"
            )
        try:
            yield live
        except CollectorUnavailable as error:
            raise JournalLocked(f"{holder} and cannot be asked: {error}") from error


@contextlib.contextmanager
def called(
    live: LiveAddress, token: str | None, ca: Path | None, seconds: float
) -> Iterator[Transport]:
    """A transport to a running collector, for requests without an answer for so many seconds."""

    def proven() -> str:
        if token is None or not live.holds():
            raise JournalLocked(f"the collector of {live.address} has ended")
        return token

    sent = None if token is None else proven  # evaluated before each request
    named = not live.loopback()  # certificates name the address that clients use, not loopback
    with admin_session(ca, named=named) as session:
        yield Transport(live.address, session=session, token=sent, timeout=seconds)


def live_account(
    live: LiveAddress, token: str | None = None, ca: Path | None = None
) -> JournalAccount:
    """The account of a running collector at one moment. Raises Refusal, CollectorUnavailable."""
    with called(live, token, ca, LEDGER_SECONDS) as transport:
        ledger = Delivery(transport, "GET", "/v1/ledger").run(wire.JournalLedger)
        account = JournalAccount(
            collector_id=ledger.collector_id,
            accepted=ledger.accepted,
            records=(),
            plans={_plan(plan): plan.steps for plan in ledger.plans},
            next_ordinals=ledger.next_ordinals,
            waiting_steps=ledger.waiting_steps,
            open_steps=ledger.open_steps,
            open_episodes=ledger.open_episodes,
            damage=tuple(ledger.damage),
            waiting_ordinals=ledger.waiting_ordinals,
            live=True,
        )
        records, damaged = _records(transport)
        # the pages are later than the ledger, and may have shards that it lacks
        known = (r for r in records if not account.is_behind(r.stream, r.first))
        damage = (*ledger.damage, *damage_texts(DamageReport(damaged_records=damaged)))
        return replace(account, records=tuple(known), damage=damage)


def _records(transport: Transport) -> tuple[list[ShardRecord], int]:
    """(recorded shards, how many records do not match their checksums)."""
    found, damaged = list[ShardRecord](), 0
    after: int | None = -1
    while after is not None:
        page = Delivery(transport, "GET", f"/v1/ledger/records?after={after}").run(wire.LedgerPage)
        found += [ShardRecord(**msgspec.structs.asdict(record)) for record in page.records]
        after, damaged = page.last, page.damaged
    return found, damaged


def _plan(plan: wire.LedgerPlan) -> Plan:
    return Plan(plan.plan_id, plan.stream, "", plan.first, plan.last, b"")


def _copy(directory: Path, folder: Path) -> None:
    for name in _FILES:
        if (directory / name).exists():
            shutil.copyfile(directory / name, folder / name)


def _account(root: Root, directory: Path, copy: Path) -> JournalAccount:
    past = _past(directory)
    with closing(SqliteJournal.open(copy)) as journal:
        policies = load_declarations(root)
        require_current(journal, partial(given_ordinals, directory.parent))
        return _account_of(journal, recover(journal, policies), past)


def _account_of(journal: SqliteJournal, found: Recovered, past: tuple[str, ...]) -> JournalAccount:
    episodes = [*found.assembler.episodes.values(), *found.assembler.closing.values()]
    records = tuple(journal.shards())  # counts damaged ones in the journal's damage
    damage = msgspec.structs.replace(journal.damage, lost_state=found.damage.lost_state)
    return JournalAccount(
        collector_id=found.damage.previous_collector_id or journal.collector_id,
        accepted=found.assembler.steps,
        records=records,
        plans={plan: steps_of(parts) for plan, parts in found.planned},
        next_ordinals=journal.streams(),
        waiting_steps=steps_of(found.waiting),
        open_steps=sum(len(episode.rewards) for episode in episodes),
        open_episodes=dict(Counter(episode.started.policy_id for episode in episodes)),
        damage=(*past, *damage_texts(damage)),
        waiting_ordinals=_ordinals(journal, found.waiting),
    )


def _past(directory: Path) -> tuple[str, ...]:
    return tuple(f"{kept.name}: {text}" for kept, text in past_damage(directory))


def _ordinals(journal: SqliteJournal, waiting: list[Sealed]) -> dict[str, int]:
    """Stream -> the ordinal after those that a start gives its waiting parts; see `Sealing`."""
    ends = journal.streams()
    for item in waiting:
        if item.part is not None:
            stream = f"{journal.collector_id}-{item.part.schema_id}"
            ends[stream] = ends.get(stream, 0) + parts_in(item.part)
    return ends
