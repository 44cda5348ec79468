"""`collect --compact`: small shards are joined beside the collector that writes them.

Also of `storage.maintenance.background`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ingest.verification import verified
from storage.objects.folder import FolderObjects
from storage.shards.replacements import FOLDER
from tests.collector_process import CollectorProcess, declare
from tests.ingest.collector.test_adoption import log, steps, stored

T = TypeVar("T")


def awaited(find: Callable[[], T]) -> T:
    """The first result that is true; a broken build never has one."""
    while not (found := find()):
        threading.Event().wait(0.05)
    return found


def children(pid: int) -> list[int]:
    """The processes that compact for a collector."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has ended
            continue
        if parent == pid and b"compact" in words:
            found.append(int(path.name))
    return found


def test_a_collector_joins_its_small_shards_in_a_child(tmp_path: Path) -> None:
    """One child at a time, with low priority, excluded by another application, killed with its
    collector. No step is lost or doubled."""
    root, text = tmp_path / "root", tmp_path / "log"
    declare(root, seal_seconds=0.01)
    options = ["--compact", "0.0003", "--log-level", "info"]  # 1 s
    with (
        FolderObjects(root).exclusive(f"{FOLDER}/lock"),
        CollectorProcess(root, options=options, log=text) as collector,
    ):
        for number in range(3):
            log(collector, f"e{number}", steps=2, end=True)
            collector.settle(2 * (number + 1))
        awaited(lambda: list(root.glob(f"{FOLDER}/*/plan.json")))
        (child,) = awaited(lambda: children(collector.process.pid))
        awaited(lambda: os.getpriority(os.PRIO_PROCESS, child) == 19)
        assert len(list(root.glob("shards/*/*.parquet"))) == 3
        os.kill(child, signal.SIGSTOP)  # it does not end by itself
        collector.kill()
        awaited(lambda: not Path(f"/proc/{child}").exists())
    with CollectorProcess(root, options=options, log=text) as collector:
        awaited(lambda: "compaction joined 3 shards to 1" in text.read_text())
        assert collector.stop() == 0
    assert len(list(root.glob("shards/*/*.parquet"))) == 1
    assert stored(root) == steps("e0", 2) | steps("e1", 2) | steps("e2", 2)
    assert verified(root).findings == ()
