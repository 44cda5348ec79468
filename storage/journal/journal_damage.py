"""What is kept of a damaged journal: `damaged-<n>/`, its files and a report beside them.

A report outlives the start that found the damage: `verify` tells of it until somebody has seen to
it and moved the folder away.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from storage.journal.records import DamageReport
from storage.system.files import sync_directory, write_synced

__all__ = ["keep_damaged", "past_damage"]

REPORT = "report.json"


def keep_damaged(
    directory: Path, report: DamageReport, *, move: Sequence[str] = (), copy: Sequence[str] = ()
) -> Path:
    """Make the next `damaged-<n>/` of a journal's directory, durably; answers it.

    Files to `move` go in the order in which they are named, the report first. A file to `copy` is
    for whoever looks into it: that there is no room for it stops nothing. Raises OSError.
    """
    n = 1
    while (directory / f"damaged-{n}").exists():
        n += 1
    target = directory / f"damaged-{n}"
    target.mkdir()
    write_synced(target / REPORT, json.dumps(_told(report)).encode())
    for name in move:
        if (directory / name).exists():
            (directory / name).rename(target / name)
    for name in copy:
        with contextlib.suppress(OSError):
            shutil.copyfile(directory / name, target / name)
    sync_directory(target)
    sync_directory(directory)
    return target


def _told(report: DamageReport) -> dict[str, object]:
    return {
        "missing_rows": report.missing_rows,
        "reason": report.reason,
        "previous_collector_id": report.previous_collector_id,
    }


def past_damage(directory: Path) -> Iterator[tuple[Path, str]]:
    """(folder, what happened) of each `damaged-<n>/` that is still in a journal's directory."""
    for folder in sorted(directory.glob("damaged-*")):
        try:
            told = json.loads((folder / REPORT).read_bytes())
            text = f"up to {told['missing_rows']} acknowledged rows are lost: {told['reason']}"
        except (OSError, ValueError, LookupError, TypeError):
            text = "a journal was set aside, and its report cannot be read"
        yield folder, text
