"""A root that is moved under its collector: the process ends, and nothing acknowledged is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collector_process import CollectorProcess, declare
from tests.faults import scenario
from tests.faults.scenario import Trial
from tests.storage.verify.test_audit import batch, verified


@pytest.mark.long
def test_moves_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    """The root is renamed, replaced by another folder, or loses its shards/: each time the
    collector ends with status 1."""
    verdict = scenario.load("moved_root").run(Trial(5, tmp_path, 3))
    assert verdict.faults == {}
    assert verdict.counts["acknowledged"] > 200


@pytest.mark.parametrize("where", ["", "journal"])
def test_a_collector_without_work_notices_too(tmp_path: Path, where: str) -> None:
    """The log names the folder that was moved, and the acknowledged steps are there at the next
    start."""
    root, log = tmp_path / "root", tmp_path / "log"
    declare(root, seal_seconds=60.0)
    with CollectorProcess(root, log=log) as collector:
        assert collector.post("/v1/events", batch("e", 3, end=True))[0] == 200
        was = root / where if where else root
        now = was.with_name("elsewhere")
        was.rename(now)
        assert collector.wait() == 1
        assert f"{was} is not there any more: it was moved" in log.read_text()
        assert "does not answer" not in log.read_text()
        now.rename(was)
        collector.restart()
        collector.stop()
    assert verified(root).ok


def test_a_collector_that_took_the_place_keeps_its_log(tmp_path: Path) -> None:
    """The collector of the moved root ends without changing what is at its path by then."""
    root, moved = tmp_path / "root", tmp_path / "moved"
    declare(root, seal_seconds=60.0)
    with CollectorProcess(root) as first:
        assert first.post("/v1/events", batch("a", 3, end=True))[0] == 200
        root.rename(moved)
        declare(root, seal_seconds=60.0)
        with CollectorProcess(root) as second:
            assert second.post("/v1/events", batch("b", 4, end=True))[0] == 200
            assert first.wait() == 1
            second.kill()
            second.restart()
            assert second.get("/readyz")[1]["steps"] == 4
            second.stop()
        first.root = moved
        first.restart()
        assert first.get("/readyz")[1]["steps"] == 3
        first.stop()
    assert verified(root).ok
    assert verified(moved).ok
