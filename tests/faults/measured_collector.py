"""A collector that reports its use of memory, files and threads on request.

    python -m tests.faults.measured_collector FOLDER MUTANT tests.plain_collector collect --root DIR

MUTANT is a planted broken build, or `none`. When FOLDER/ask appears, FOLDER/answer is written: a
JSON object with the counts. Limits on remembered items are low, so that a short run exceeds them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
from pathlib import Path

from ingest.episodes.sealed_parts import Limits
from tests.faults import launcher

POLL_SECONDS = 0.02
BOUND = 500


def counts() -> dict[str, int]:
    """Objects tracked by the garbage collector, memory blocks, files, threads, bytes."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": int(status.split("VmRSS:")[1].split()[0]) * 1024,
    }


def answer(folder: Path) -> None:
    """Answer for ever."""
    while True:
        threading.Event().wait(POLL_SECONDS)
        if (folder / "ask").exists():
            (folder / "ask").unlink()
            (folder / "answer.new").write_text(json.dumps(counts()))
            (folder / "answer.new").rename(folder / "answer")


def main(folder: str, mutant: str, package: str, *arguments: str) -> int:
    Limits.__init__.__defaults__ = (100_000, BOUND, BOUND, BOUND, BOUND)  # type: ignore[attr-defined]
    threading.Thread(target=answer, args=(Path(folder),), daemon=True).start()
    if mutant != "none":
        return launcher.main(mutant, package, *arguments)
    status: int = importlib.import_module(f"{package}.__main__").main(list(arguments))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
