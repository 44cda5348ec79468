"""`train --follow` while another trainer has the policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from storage.weights.files import PolicyFiles
from storage.weights.lease import Lease
from tests.headrace.command import Result

CODE = """\
import sys
sys.modules["torch"] = None  # importing it fails
from headrace.__main__ import main
sys.argv = ["headrace", "train", "--follow", "--root", sys.argv[1]]
main()
"""


def follow(root: Path) -> Result:
    return subprocess.run(
        [sys.executable, "-c", CODE, root], capture_output=True, text=True, check=False
    )


def test_another_trainer_is_named_before_torch_is_loaded(tmp_path: Path) -> None:
    """`up` repeats a refused start for as long as another trainer has the lease."""
    folder = tmp_path / "weights" / "default"
    folder.mkdir(parents=True)
    lease = Lease.take(PolicyFiles(folder.parents[1], folder.name))
    refused = follow(tmp_path)
    lease.release()
    assert refused.returncode == 3
    assert f"process {os.getpid()} on " in refused.stderr
    assert "needs torch" in follow(tmp_path).stderr
