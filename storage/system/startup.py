"""How a process of ours starts sooner: what is set before its heavy imports, and left out of them.

A killed collector, or its shard writer, is ready again once its modules are loaded; that takes
longer than reading the journal. For the entry points of such processes alone: a library must not
do this to somebody else's process.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["leave_out", "loading", "use_one_blas_thread"]

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def use_one_blas_thread() -> None:
    """Let numpy's BLAS start no threads of its own, unless the environment asks for some.

    Each would spin for tens of milliseconds when it starts. To be called before numpy is imported.
    """
    if not {_BLAS_THREADS, "OMP_NUM_THREADS"} & os.environ.keys():
        os.environ[_BLAS_THREADS] = "1"


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage within the block, and take what is left of it for lasting.

    Modules and what a journal is read into stay; looking at them again and again costs a tenth of
    the start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_out(name: str) -> None:
    """Have imports of a top-level module fail in this process, as if it were not installed."""
    sys.meta_path.insert(0, _LeftOut(name))


class _LeftOut:
    """A finder that refuses one name; a `None` in `sys.modules` would be taken for the module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == self._name:
            raise ModuleNotFoundError(f"{name} is left out of this process", name=name)
        return None
