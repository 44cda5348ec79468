"""How commands tell their results: tables and bars for people, one line of JSON for programs.

Tables go to stdout, progress to stderr, so that a pipe gets the result alone. Needs rich (the [cli]
extra).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPED_WIDTH = 140
"""Characters in a line when stdout is no terminal: what stands in files and logs is not cut."""


def line(document: Mapping[str, Any]) -> None:
    """The result as one line of strict JSON. Raises ValueError for NaN and infinity."""
    print(json.dumps(document, allow_nan=False), flush=True)


def printable(text: str) -> str:
    """A name of a file for a terminal: what that would obey, or UTF-8 cannot hold, is escaped."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout; whole numbers to the right, None as nothing."""
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
    """Live bars on stderr: call what is yielded with what is done, how far, of how much.

    A file or a pipe gets none: bars are for eyes.
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


def moment(micros: int | None) -> str:
    """A time (microseconds since the epoch) for people, UTC; None is nothing.

    One that no calendar has is its number: clients send any.
    """
    if micros is None:
        return ""
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{micros} us"
