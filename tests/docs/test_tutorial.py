"""docs/tutorial.md is run as written: its commands in order, against its own collector."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVES = re.compile(r"(http://\S+)")
VARIES = re.compile(r"\d+\.\d+|\d+(?= orders)")  # seconds, and the visitors' actions
NUMBER = r"[\d.]+"
SECONDS = 120


def start(command: str, home: Path, env: Mapping[str, str]) -> tuple[subprocess.Popen[str], str]:
    """The collector of the page on a free port, and its address."""
    process = subprocess.Popen(
        ["sh", "-c", f"exec {command}"], cwd=home, env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = SERVES.search(process.stdout.readline())
    assert found is not None
    return process, found[1]


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    return process.returncode


def is_printed(line: str, printed: str) -> bool:
    """Whether it is a complete line of the output, except for numbers that vary."""
    fixed = map(re.escape, VARIES.split(line))
    return re.search(f"^{NUMBER.join(fixed)}$", printed, re.MULTILINE) is not None


def await_rows(root: Path, number: int) -> None:
    """Wait as the page does."""
    pause = threading.Event()
    for _ in range(SECONDS * 5):
        shards = root.glob("shards/*/*.parquet")
        if sum(pq.read_metadata(path).num_rows for path in shards) >= number:
            return
        pause.wait(0.2)
    raise AssertionError(f"{number} rows never came")


def test_the_tutorial_runs_as_it_stands(tmp_path: Path, loaded: Path) -> None:
    """The preceding commands print each line of a `text` block."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    bins = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": bins, "HEADRACE_COLLECT_PORT": "0", "PYTHONPATH": str(ROOT)}
    quick = {"PATH": f"{loaded}:{bins}"}  # for commands that nobody sends a signal
    rows, printed = iter((4_000, 5_000)), ""
    with ExitStack() as stack:
        for kind, text in BLOCK.findall(PAGE):
            if kind == "text":
                for line in text.splitlines():
                    assert is_printed(line, printed), line
            elif text.startswith("headrace collect"):
                process, env["HEADRACE_ADDRESS"] = start(text, tmp_path, env)
                stack.callback(process.kill)
            else:
                if text.startswith("headrace train"):
                    await_rows(tmp_path / "data/run/shop", next(rows))
                done = subprocess.run(
                    ["sh", "-ec", text],
                    cwd=tmp_path, env=env | quick, capture_output=True, text=True,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                printed = done.stdout
        result = subprocess.run(
            [sys.executable, "examples/recommender/orders.py"],
            input="nobody\nno-one\n", cwd=tmp_path, env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert result.stdout == "0 orders logged, 0 known already, 2 refused\n"
        assert result.stderr.splitlines() == [
            "reward 'order-of-nobody' of step 0: Episode nobody not found.",
            "reward 'order-of-no-one' of step 0: Episode no-one not found.",
        ]
        assert stop(process) == 0
    orders = (tmp_path / "orders.txt").read_text().splitlines()
    assert 250 < len(orders) < 350  # of 1,000 visits; random offers make about 175
    assert next(rows, None) is None
