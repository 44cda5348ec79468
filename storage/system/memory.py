"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["return_memory"]


def return_memory() -> None:
    """Collect young garbage, then release unused pages of glibc and, if loaded, of Arrow."""
    gc.collect(1)
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        arrow.default_memory_pool().release_unused()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
