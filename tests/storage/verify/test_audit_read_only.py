"""`verify` and `ls` of a read-only root: a snapshot, a mounted backup."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import ROOT, answer

MOUNT = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
OBS = [0.5, 0.5, 0.5, 0.5]


def mounted(root: Path) -> list[str]:
    """The words that run a command with the root mounted read-only, or those of `bare` where
    mounting is not allowed."""
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, str(root)]
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    return words if tried.returncode == 0 else bare(root)


def bare(root: Path) -> list[str]:
    """The words that run a command without the right to write in the root, even as the user
    root."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    return drop if os.geteuid() == 0 else []


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a step in a shard and one in an open episode."""
    root = tmp_path_factory.mktemp("kept") / "root"
    declare(root)
    with CollectorProcess(root) as collector:
        for name in ("ended", "open"):
            collector.post("/v1/episodes", {"episode_id": name})
            collector.post(f"/v1/episodes/{name}/log_action", {"obs": OBS, "action": 1})
        collector.post("/v1/episodes/ended/end", {})
        collector.settle(1)
        collector.stop()
    return root


@pytest.fixture
def root(kept: Path, tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    shutil.copytree(kept, root)
    yield root
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)


@pytest.mark.parametrize("lock", ["there", "left out"])
@pytest.mark.parametrize("way", [mounted, bare])
def test_a_root_that_is_read_only_can_be_looked_at(
    root: Path, way: Callable[[Path], list[str]], lock: str
) -> None:
    """All that there is, as of a root that may be written to; a backup may lack the lock's file."""
    if lock == "left out":
        (root / "journal" / "lock").unlink()

    def run(command: str) -> subprocess.CompletedProcess[str]:
        words = [*prefix, sys.executable, "-m", "headrace", command, "--root", str(root), "--json"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    prefix = way(root)
    touch = [*prefix, "touch", str(root / "journal" / "new")]
    assert subprocess.run(touch, capture_output=True, check=False).returncode != 0
    found = run("verify")
    assert (found.returncode, found.stderr) == (0, "")
    report = answer(found)
    assert (report["in_shards"], report["in_journal"]) == (1, 1)
    if (way, lock) == (mounted, "there"):
        assert answer(run("ls"))["open_episodes"] == {"default": 1}
