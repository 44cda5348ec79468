"""How much memory this process may have; return freed memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 2**60
_ARENA_MAX = -8  # M_ARENA_MAX of glibc's mallopt


class MemoryCap(NamedTuple):
    """A limit on memory and what this process uses of it, in bytes."""

    name: str
    size: int
    used: int


def memory_caps(system: Path = Path("/")) -> list[MemoryCap]:
    """The limits that control groups (`cgroup`) and RLIMIT_AS set for this process.

    A control group may have more processes, and counts their resident memory. RLIMIT_AS limits
    the address space of each process.
    """
    status = (system / "proc/self/status").read_text()
    limits = [("cgroup", size, "VmRSS") for size in _group_limits(system)]
    limits.append(("RLIMIT_AS", resource.getrlimit(resource.RLIMIT_AS)[0], "VmSize"))
    return [
        MemoryCap(name, size, int(status.partition(f"{use}:")[2].split()[0]) * 1024)
        for name, size, use in limits
        if 0 <= size < _NO_LIMIT
    ]


def _group_limits(system: Path) -> Iterator[int]:
    """The memory limits of this process's control groups and those that contain them, v1 and v2.

    Inside a container the paths may be those of the host, so all parents are looked at.
    """
    mounted = system / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            top, file = (
                (mounted / "memory", "memory.limit_in_bytes") if kinds else (mounted, "memory.max")
            )
            group = top / path.strip("/")
            for one in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):
                    yield int((one / file).read_text())
                if one == top:
                    break


def few_arenas() -> None:
    """Under RLIMIT_AS, let the threads share two of glibc's arenas: each reserves 64 MB or more."""
    library = ctypes.CDLL(None)
    if resource.getrlimit(resource.RLIMIT_AS)[0] >= 0 and hasattr(library, "mallopt"):
        library.mallopt(_ARENA_MAX, 2)


def return_memory() -> None:
    """Collect young garbage, then release unused pages of glibc and, if loaded, of Arrow."""
    gc.collect(1)
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        arrow.default_memory_pool().release_unused()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
