"""Permissions of the files that a collector writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingest.access.key_files import create_token
from storage.journal.sqlite_journal import SqliteJournal
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import ROOT
from tests.storage.verify.test_audit import batch, shards, verified

MADE_BEFORE = {"", "policies", "policies/default.json"}
"""The files that a command made before any collector ran; they hold no rows."""


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(root: Path) -> dict[str, int]:
    """Path under the root -> permission bits."""
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    return {name: stat.S_IMODE(path.lstat().st_mode) for name, path in found.items()}


def is_behind_a_door(path: str) -> bool:
    """Whether it lies in a folder that only its owner may enter."""
    folder, _, inside = path.partition("/")
    return folder in ("journal", "keys") and bool(inside)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_others_can_read_nothing_and_the_group_shards_alone(tmp_path: Path, mask: int) -> None:
    """This holds for all files under a root, whatever the umask of the shell that started the
    collector.
    """
    root = tmp_path / "root"
    with umask(mask):
        declare(root, redact={"infos.who": "hash"})
        _, token = create_token(root, "t", ["log"])
        with CollectorProcess(root) as collector:
            bearer = {"authorization": f"Bearer {token}"}
            assert collector.post("/v1/events", batch("a", 3, end=True), **bearer)[0] == 200
            collector.settle(3, **bearer)
            assert collector.post("/v1/events", batch("b", 3, end=False), **bearer)[0] == 200
            running = modes(root)
            assert collector.stop() == 0
    found = {**running, **modes(root)}
    assert {"journal/journal.db", "journal/address", "journal/high-water"} <= found.keys()
    assert {"keys/tokens.json", "keys/redaction.key", "keys/lock"} <= found.keys()
    assert (found["journal"], found["keys"]) == (0o700, 0o700)
    open_to_others = {path for path, mode in found.items() if mode & 0o007}
    assert {path for path in open_to_others - MADE_BEFORE if not is_behind_a_door(path)} == set()
    (shard,) = (path.relative_to(root).as_posix() for path in shards(root))
    group = 0o050 & ~mask
    assert [found[path] & 0o050 for path in ("shards", shard.rpartition("/")[0])] == [group] * 2
    assert found[shard] & 0o070 & ~0o020 == group & 0o040
    assert verified(root).ok


def test_only_a_commands_start_changes_the_umask() -> None:
    """The umask belongs to the whole process: to other threads that write, and to the shard
    writer.
    """
    packages = [ROOT / name for name in ("storage", "policy", "ingest")]
    sources = [path for package in packages for path in package.rglob("*.py")]
    assert [path.name for path in sources if "umask(" in path.read_text()] == ["process.py"]


def test_a_journal_of_earlier_days_is_closed_to_others(tmp_path: Path) -> None:
    """The next start closes its folder; a process that has a file of it open keeps access."""
    with umask(0o022):
        SqliteJournal.open(tmp_path / "journal").close()
        (tmp_path / "journal").chmod(0o755)
        SqliteJournal.open(tmp_path / "journal").close()
    assert modes(tmp_path)["journal"] == 0o700
