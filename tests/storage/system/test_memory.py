"""How much memory a process may have; freed memory goes back to the operating system."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from storage.system.memory import memory_caps

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


UNLIMITED = "9223372036854771712"  # as the kernel writes it for version 1


def system(tmp_path: Path, groups: str, limits: dict[str, str]) -> Path:
    """A system's files, in which this process has 50 MB."""
    files = {"proc/self/status": "VmSize:\t 400000 kB\nVmRSS:\t 50000 kB\n"}
    files |= {"proc/self/cgroup": groups}
    for name, text in {**files, **{f"sys/fs/cgroup/{n}": t for n, t in limits.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "limits", "sizes"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "700\n"}, [700]),
        ("0::/a/b\n", {"a/b/memory.max": "500\n", "a/memory.max": "700\n"}, [500, 700]),
        ("0::/\n", {"memory.max": "700\n"}, [700]),
        ("0::/host/path\n", {"memory.max": "700\n"}, [700]),  # seen from inside a container
        (
            "4:cpu,memory:/a\n1:cpu:/\n",
            {"memory/a/memory.limit_in_bytes": "700\n", "memory/memory.limit_in_bytes": UNLIMITED},
            [700],
        ),
        ("4:memory:/a\n0::/\n", {"memory/memory.limit_in_bytes": "700\n"}, [700]),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": UNLIMITED}, []),
        ("0::/a\n", {"a/memory.max": "what\n"}, []),
        ("", {}, []),
    ],
)
def test_limits_of_control_groups_are_found(
    tmp_path: Path, groups: str, limits: dict[str, str], sizes: list[int]
) -> None:
    """Of both versions, of the group and of those that contain it."""
    caps = [cap for cap in memory_caps(system(tmp_path, groups, limits)) if cap.name == "cgroup"]
    assert [(cap.size, cap.used) for cap in caps] == [(size, 50_000 * 1024) for size in sizes]


CAPPED = """
import resource, threading
from storage.system.memory import few_arenas, memory_caps

resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
few_arenas()
over = threading.Event()

def work():
    bytearray(1000)
    over.wait()

for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
(cap,) = [cap for cap in memory_caps() if cap.name == "RLIMIT_AS"]
print(cap.size, cap.used)
"""


def test_the_address_space_is_a_limit_that_threads_do_not_use_up() -> None:
    """Eight threads take their stacks of 8 MB, and no arenas of 64 MB each."""
    done = subprocess.run([sys.executable, "-c", CAPPED], check=True, stdout=subprocess.PIPE)
    size, used = map(int, done.stdout.split())
    assert size == 2**31
    assert 0 < used < 8 * 64 * 2**20
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert "RLIMIT_AS" not in [cap.name for cap in memory_caps()]
