"""Output of commands: tables and bars for people, one line of JSON for programs.

Tables go to stdout, progress to stderr, so that a pipe gets only the result. Needs rich (the [cli]
extra).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from storage.wording import counted

PIPED_WIDTH = 140
"""Characters per line if stdout is not a terminal, so that tables in files are not cut."""


def line(document: Mapping[str, Any]) -> None:
    """Print the result as one line of strict JSON. Raises ValueError for NaN and infinity."""
    print(json.dumps(document, allow_nan=False), flush=True)


def printable(text: str) -> str:
    """Escape a file name for a terminal: control characters, and what UTF-8 cannot encode."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on stdout; columns of integers are aligned right, None is empty."""
    drawn = Table()
    lines = [tuple(row) for row in rows]
    for at, name in enumerate(columns):
        numbers = all(isinstance(cells[at], int) for cells in lines)
        drawn.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for cells in lines:
        drawn.add_row(*map(_cell, cells))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, markup=False).print(
        title, drawn, sep="\n"
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show live bars on stderr; yield a function of (what is done, amount done, total).

    Nothing is shown if stderr is not a terminal.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    tasks: dict[str, Any] = {}

    def tell(what: str, done: int, total: int | None, /) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what)
        bar.update(tasks[what], completed=done, total=total)

    with bar:
        yield tell


@contextlib.contextmanager
def counting(every: float) -> Iterator[Callable[[int, int], None]]:
    """Show rows while they are read; yield a function of (rows, rows that were left out).

    On a terminal it is a line that changes. Otherwise stderr gets a line every `every` seconds.
    """
    console = Console(stderr=True)
    began = last = time.monotonic()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("")

    def tell(rows: int, left_out: int, /) -> None:
        nonlocal last
        now = time.monotonic()
        rate = rows / max(now - began, 1e-3)
        text = f"{counted(rows, 'row')}, {rate:,.0f} a second, {left_out:,} left out"
        bar.update(task, description=text)
        if not console.is_terminal and now - last >= every:
            last = now
            print(text, file=sys.stderr, flush=True)

    with bar:
        yield tell


def moment(micros: int | None) -> str:
    """A time (microseconds since the epoch) as text in UTC; empty for None.

    A time outside the calendar, which clients can send, is shown as its number.
    """
    if micros is None:
        return ""
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{micros} us"
