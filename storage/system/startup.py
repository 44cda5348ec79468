"""Faster starts of our processes: settings before heavy imports, and modules not to import.

A killed collector or shard writer is ready again once its modules are loaded, which takes longer
than reading the journal. Only entry points may use this: a library must not change another
program's process.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def use_one_blas_thread() -> None:
    """Prevent numpy's BLAS from starting threads, unless the environment asks for them.

    Each thread would use the CPU for tens of milliseconds at its start. Call this before importing
    numpy.
    """
    if not {_BLAS_THREADS, "OMP_NUM_THREADS"} & os.environ.keys():
        os.environ[_BLAS_THREADS] = "1"


@contextmanager
def loading() -> Iterator[None]:
    """Disable garbage collection within the block, and then exempt all its objects from it.

    Modules, and state read from a journal, stay in memory; scanning them repeatedly takes a tenth
    of the start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_out(name: str) -> None:
    """Make imports of a top-level module fail in this process, as if it were not installed."""
    sys.meta_path.insert(0, _RefusingFinder(name))


class _RefusingFinder:
    """A finder that refuses one name. A `None` in `sys.modules` would pass for the module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == self._name:
            raise ModuleNotFoundError(f"{name} is left out of this process", name=name)
        return None
