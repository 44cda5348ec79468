"""docs/backup.md is run from top to bottom, beside a collector that goes on."""

from __future__ import annotations

from pathlib import Path

from tests.collector_process import CollectorProcess, declare
from tests.docs.test_docs import blocks
from tests.docs.test_security import shell
from tests.ingest.collector.test_adoption import log, steps, stored


def test_the_page_is_followed_to_the_letter(tmp_path: Path, loaded: Path) -> None:
    """The backup has what was acknowledged before; the old root loses nothing that is in shards."""
    save, restore, adopt = blocks("docs/backup.md", "sh")
    root = tmp_path / "data/run/shop"
    declare(root, seal_seconds=0.05, episode_timeout=600.0)
    with CollectorProcess(root) as collector:
        log(collector, "before", steps=2, end=True)
        log(collector, "open", steps=2)
        collector.settle(2)
        assert "Copied" in shell(loaded, save, tmp_path)
        log(collector, "after", steps=2, end=True)
        collector.settle(4)
        assert "Copied" in shell(loaded, save, tmp_path)
        log(collector, "late", steps=2, end=True)
        collector.settle(6)
        assert "ended 1 episode" in shell(loaded, restore, tmp_path)
        collector.kill()
    backed_up = steps("before", 2) | steps("after", 2) | steps("open", 2)
    assert stored(root.parent / "restored") == backed_up
    found = shell(loaded, adopt, tmp_path)
    assert "recorded 1 shard with 2 steps" in found
    assert stored(root) == backed_up | steps("late", 2)
    with CollectorProcess(root) as collector:
        log(collector, "more", steps=1, end=True)
        collector.settle(9)
        assert collector.stop() == 0
