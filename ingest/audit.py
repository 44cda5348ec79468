"""The journal's side of `verify` and `ls`: what it says was accepted, and where the steps are.

    with journal_account(root) as account:     # the collector is kept out meanwhile
        account.accepted, account.open_steps

The journal's files are copied and the copy is replayed, exactly as a collector would at its start:
nothing of the original changes, whatever it holds.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ingest.recovery import Recovered, recover
from ingest.sealed import Sealed
from storage.errors import JournalLocked
from storage.files import FileLock
from storage.journal import DamageReport, SqliteJournal
from storage.journal_damage import past_damage
from storage.journal_database import DATABASE
from storage.maintenance import JournalAccount
from storage.policy_files import load_declarations

_FILES = (DATABASE, f"{DATABASE}-wal", "high-water")


@contextlib.contextmanager
def journal_account(root: Path) -> Iterator[JournalAccount | None]:
    """The account of the journal under `root`, None when there is none.

    Holds the collector's lock until the block ends. Raises JournalLocked, naming the process, when
    a collector runs on it; OSError.
    """
    directory = root / "journal"
    if not (directory / DATABASE).exists():
        yield None
        return
    lock = FileLock(directory / "lock")
    if not lock.acquire(blocking=False):
        raise JournalLocked(
            f"a collector runs on {root} (process {lock.holder()}): stop it first, SIGTERM drains "
            "it; this looks at what is at rest"
        )
    try:
        yield _account(root, directory)
    finally:
        lock.release()


def _account(root: Path, directory: Path) -> JournalAccount:
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        for name in _FILES:
            if (directory / name).exists():
                shutil.copyfile(directory / name, Path(folder) / name)
        past = [f"{kept.name}: {text}" for kept, text in past_damage(directory)]
        journal = SqliteJournal.open(Path(folder))
        try:
            found = recover(journal, load_declarations(root))
            return _told(journal, found, past)
        finally:
            journal.close()


def _told(journal: SqliteJournal, found: Recovered, past: list[str]) -> JournalAccount:
    episodes = found.assembler.episodes.values()
    return JournalAccount(
        collector_id=found.damage.previous_collector_id or journal.collector_id,
        accepted=found.assembler.steps,
        records=tuple(journal.shards()),
        plans={plan: _steps(parts) for plan, parts in found.planned},
        next_ordinals=journal.streams(),
        waiting_steps=_steps(found.waiting),
        open_steps=sum(len(episode.rewards) for episode in episodes),
        open_episodes=dict(Counter(episode.started.policy_id for episode in episodes)),
        damage=(*past, *_damage(found.damage)),
    )


def _steps(sealed: list[Sealed]) -> int:
    return sum(item.part.steps for item in sealed if item.part is not None)


def _damage(damage: DamageReport) -> tuple[str, ...]:
    texts = {
        "rows were acknowledged and are missing at its end": damage.missing_rows,
        "rows are missing inside it": damage.lost_rows,
        "rows do not fit their checksum": damage.damaged_rows,
    }
    told = [f"{count} {text}" for text, count in texts.items() if count]
    if damage.set_aside is not None:
        told.append(f"the database cannot be read: {damage.reason}")
    return tuple(told)
