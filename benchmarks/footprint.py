"""The cost of the base install for a service: disk, import time, memory.

`python -m benchmarks.footprint`. Baseline: numpy alone, in its own interpreter. Sizes are those of
the files that pip records, without compiled bytecode. Headrace's size is that of all its packages,
of which a client imports only a part.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from benchmarks.report import Figure, render

ROUNDS = 9
MB = 1e6
PACKAGES = ("headrace", "ingest", "policy", "storage")
COST = """
import time
began = time.perf_counter()
{}
seconds = time.perf_counter() - began
with open("/proc/self/status") as status:  # rusage has the peak of whoever started this one, too
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(seconds, int(peak) * 1024)
"""
NUMPY = "import numpy"
CLIENT = "from headrace import PolicyClient\nPolicyClient('http://127.0.0.1:9').start_episode()"
END = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"


def closure(name: str, found: set[str]) -> set[str]:
    """A distribution and its requirements without extras."""
    if name not in found:
        found.add(name)
        for line in distribution(name).requires or ():
            if "extra ==" not in line and "python_version <" not in line:
                closure(re.match(r"[\w.-]+", line)[0].lower(), found)  # type: ignore[index]  # it begins with a name
    return found


def installed(name: str) -> int:
    """Bytes of a distribution's files."""
    files = distribution(name).files or ()
    paths = [Path(str(file.locate())) for file in files if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file())


def own() -> int:
    """Bytes of Headrace's own modules."""
    root = Path(__file__).parents[1]
    return sum(file.stat().st_size for name in PACKAGES for file in (root / name).rglob("*.py"))


def cost(code: str) -> tuple[float, float]:
    """Seconds and peak bytes of an interpreter that runs the code."""
    words = [sys.executable, "-c", COST.format(code) + END]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


def run() -> list[Figure]:
    """Disk, import and memory, each compared with numpy's."""
    disk = sum(map(installed, closure("headrace", set()) - {"headrace"})) + own()
    costs: dict[str, list[tuple[float, float]]] = {NUMPY: [], CLIENT: []}
    for _ in range(ROUNDS):
        for code, found in costs.items():
            found.append(cost(code))
    seconds, peak = (
        {code: statistics.median(one[i] for one in found) for code, found in costs.items()}
        for i in (0, 1)
    )
    rows = (
        ("base install", disk / MB, installed("numpy") / MB, "MB"),
        ("import and first call", seconds[CLIENT] * 1e3, seconds[NUMPY] * 1e3, "ms"),
        ("memory after it", peak[CLIENT] / MB, peak[NUMPY] / MB, "MB"),
    )
    return [
        Figure(name=name, value=value, unit=unit, baseline_name="numpy", baseline_value=base)
        for name, value, base, unit in rows
    ]


if __name__ == "__main__":
    print(render(run()))
