"""The Open Bandit Dataset: CSV files of a campaign, one row per recommended item."""

from __future__ import annotations

from pathlib import Path

from ingest.importing.engine import Workspace
from ingest.importing.formats.recipes import Recipe, whole_files
from ingest.importing.options import ImportOptions
from ingest.protocol.errors import ImportFailed

_FIXED = ("timestamp", "item_id", "position", "click", "propensity_score")


def obd(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A campaign's file, or a folder of them, without the item_context.csv beside it.

    The propensity is the item's at its position, so the position is part of the observation.
    """
    units = [unit for unit in whole_files(path) if {*_FIXED} <= {*unit.names()}]
    if not units:
        raise ImportFailed(f"{path}: expected CSV with the columns {', '.join(_FIXED)}, got none")
    users = [name for name in units[0].names() if name.startswith("user_feature_")]
    found = {
        "observation": [f"{name}:categories" for name in (*users, "position")],
        "action": ["item_id"],
        "reward": "click",
        "action_prob": "propensity_score",
        "time": "timestamp",
    }
    return Recipe(units, found)
