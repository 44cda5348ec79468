"""The formats by name, and an export as a whole: all files of a data set, or none."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policy.data.log_selection import LogSelection
from policy.exporting.runs import ExportFailed, Log
from storage.errors import NothingYet
from storage.spaces.descriptors import space_to_json

FORMATS = {
    "d3rlpy": "hdf5",
    "huggingface": "tables",
    "jsonl": "tables",
    "lerobot": "lerobot",
    "minari": "hdf5",
    "rllib": "tables",
    "rllib-episodes": "episodes",
    "torchrl": "torchrl",
}
"""Name -> the module with its function `NAME(log, folder)`."""
ABOUT = "headrace.json"


@dataclass(frozen=True)
class ExportReport:
    """What was written: `left_out` are rows whose next observation the format needs."""

    format: str
    output: str
    rows: int
    episodes: int
    left_out: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(selection: LogSelection, to: str, output: Path) -> ExportReport:
    """Write the episodes of a selection as a data set of `to`, in the new folder `output`.

    Its `headrace.json` has the spaces, and the ordinals of all rows as `add_candidate` takes them.
    Raises ExportFailed, NothingYet, and FileExistsError for a folder that is there.
    """
    if to not in FORMATS:
        raise ExportFailed(f"to: expected one of {', '.join(FORMATS)}, got {to!r:.80}")
    if output.exists():
        raise FileExistsError(f"{output}: expected a new folder, got one that is there")
    module = importlib.import_module(f"{__package__}.{FORMATS[to]}")
    write: Callable[[Log, Path], None] = getattr(module, to.replace("-", "_"))
    log = Log(selection)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        write(log, unfinished)
        if not log.rows:
            what = f"steps of policy {selection.policy_id!r} that {to} can hold"
            raise NothingYet(f"{selection.root}: expected {what}, got none")
        report = ExportReport(to, str(output), log.rows, log.runs, log.left_out)
        _note(log, report, unfinished / ABOUT)
        unfinished.rename(output)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return report


def _note(log: Log, report: ExportReport, file: Path) -> None:
    observation, action = map(space_to_json, log.spaces)
    document = {
        "format_version": 1,
        **report.to_dict(),
        "policy_id": log.selection.policy_id,
        "observation": observation,
        "action": action,
        "lineage": log.lineage,
    }
    del document["output"]
    file.write_text(json.dumps(document, indent=1))
