"""Freed memory goes back to the operating system."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import pyarrow
from storage.system.memory import return_memory

def resident():
    with open("/proc/self/status") as status:
        return int(status.read().partition("VmRSS:")[2].split()[0]) // 1000

before = resident()
blocks = [bytes(50_000) for _ in range(2_000)]
kept = blocks[::2]  # no gap is as wide as two
del blocks
full = resident()
if "kept" not in sys.argv:
    return_memory()
print(full - before, resident() - before)
"""


def megabytes(*words: str) -> tuple[int, int]:
    output = subprocess.run(
        [sys.executable, "-c", CODE, *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    full, after = map(int, output.split())
    return full, after


def test_gaps_between_blocks_in_use_are_returned() -> None:
    """The call returns the gaps, half of 100 MB, to the system; without it they stay."""
    full, after = megabytes()
    assert full > 80  # the blocks fill what importing left free, too
    assert after < full * 0.65
    full, after = megabytes("kept")
    assert after > full * 0.95
