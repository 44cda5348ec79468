"""The disk fills up at any call of `apply`: no row is lost, and the next application finishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.disk import Disk

PROGRAM = """
import errno, itertools, json, sys
from pathlib import Path
from storage.maintenance.compaction import plan_compaction
from storage.maintenance.plans import apply, save
from tests.faults.disk import Disk
from tests.storage.maintenance.test_compaction import check_each_row_once, small_shards

disk = Disk.of_environment()
for kind, share in (("write", 1), ("open", 2), ("rename", 4)):
    for nth in itertools.count(1, max(1, int(sys.argv[2]) // share)):
        root = Path(sys.argv[1]) / f"{kind}-{nth}"
        parts = small_shards(root, count=4)
        plan = plan_compaction(root, None)
        before = disk.fired
        disk.fail("collector", kind, nth, errno.ENOSPC, count=10**9)  # full from then on
        error = None
        try:
            save(root, plan)
            apply(root, plan, by="me", why="")
        except OSError as failure:
            error = failure
        disk.disarm()
        if error is None:
            break
        assert error.errno == errno.ENOSPC, repr(error)
        assert disk.fired > before
        check_each_row_once(root, parts)
        assert save(root, plan) == plan.digest
        apply(root, plan, by="me", why="")
        check_each_row_once(root, parts)
        files = [path.name for path in root.rglob("*") if path.is_file()]
        assert not [name for name in files if name.startswith(".")], files
        assert len([name for name in files if name.endswith(".parquet")]) == 1
    print(json.dumps([kind, nth]), flush=True)
"""


@pytest.mark.parametrize("every", [32, pytest.param(1, marks=pytest.mark.long)])
def test_an_application_on_a_full_disk_is_finished_when_there_is_space(
    every: int, tmp_path: Path
) -> None:
    """ENOSPC from the nth write, open or rename on: each row is read once, and `verify` finds
    nothing. Afterwards the plan is applied, and no half-written file is left."""
    disk = Disk.create(tmp_path / "volume")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(disk.root), str(every)],
        env={**os.environ, **disk.environment},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calls = dict(json.loads(line) for line in done.stdout.splitlines())
    assert calls["write"] > 50
    assert calls["open"] > 20
    assert calls["rename"] > 5
