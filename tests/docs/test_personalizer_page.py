"""The page for people who come from Personalizer runs: each call, with what it prints."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.collector_process import CollectorProcess
from tests.docs.test_docs import blocks, run_python


def test_the_page_about_personalizer_runs(tmp_path: Path, loaded: Path) -> None:
    """The first block declares; a collector of that root answers the calls of the others."""
    declare, *calls = blocks("docs/personalizer.md", "python")
    python, code = loaded / "python", "\n".join(calls)
    subprocess.run([python, "-c", declare], cwd=tmp_path, check=True)
    with CollectorProcess(tmp_path / "data/run/feed") as collector:
        printed = run_python(python, code, tmp_path, collector).splitlines()
        assert collector.get("/v1/episodes/e3")[1]["state"] == "terminated"
        assert collector.get("/readyz")[1]["steps"] == 5
    wanted = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert printed == wanted
    assert len(wanted) == 4
