"""`headrace report` on the command line."""

from __future__ import annotations

from pathlib import Path

from tests.headrace.command import answer, headrace, process, refused
from tests.policy.judging.test_canary import EQUAL, Traffic


def test_a_report_is_one_file(tmp_path: Path) -> None:
    Traffic(tmp_path).log(20, EQUAL)
    output = tmp_path / "out" / "report.html"
    done = answer(process("report", "--root", tmp_path, "-o", output, "--json"))
    assert done == {
        "output": str(output),
        "bytes": output.stat().st_size,
        "steps": 20,
        "versions": 1,
        "decisions": 0,
    }
    assert output.read_text().startswith("<!doctype html>")
    assert refused(headrace("report", "--root", tmp_path / "none"), "expected a folder")
