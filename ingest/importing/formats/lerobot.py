"""LeRobot's data sets, versions 2 and 3: Parquet in `data`, described by `meta/info.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingest.importing.engine import Workspace
from ingest.importing.formats.recipes import Recipe, actions_option
from ingest.importing.options import ImportOptions
from ingest.importing.sources import FileUnit, require_whole
from ingest.protocol.errors import ImportFailed

_REWARD, _DONE, _TRUNCATED = "next.reward", "next.done", "next.truncated"
_NUMBERS = ("float", "int", "uint", "bool")


def lerobot(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """The folder of a data set. Images and videos are left out, and named."""
    features = _features(path / "meta" / "info.json")
    files = sorted((path / "data").rglob("*.parquet"))
    if not files:
        raise ImportFailed(f"{path / 'data'}: expected Parquet files in it, got none")
    seen = [name for name in features if name.split(".")[0] == "observation"]
    numbers = [name for name in seen if features[name].startswith(_NUMBERS)]
    others = [name for name in seen if name not in numbers]
    notes = [f"{', '.join(others)}: images and videos are left out"] if others else []
    hive = {}
    if _REWARD not in features:
        hive[_REWARD] = "0"
        notes.append(f"the data set has no {_REWARD}: every reward is 0")
    if _DONE not in features:
        notes.append(f"the data set has no {_DONE}: every episode ends as terminated")
    units = [FileUnit(file, str(file.relative_to(path)), hive) for file in files]
    require_whole(units)
    found: dict[str, Any] = {
        "observation": numbers,
        "action": actions_option(["action"], features["action"].startswith("float")),
        "reward": _REWARD,
        "episode": "episode_index",
        "step": "frame_index",
        "tags": {"task_index": "task_index"} if "task_index" in features else {},
    }
    ends = {"terminated": _DONE, "truncated": _TRUNCATED}
    found |= {option: name for option, name in ends.items() if name in features}
    return Recipe([*units], found, notes)


def _features(info: Path) -> dict[str, str]:
    """Name -> dtype of each column. Raises ImportFailed for another version."""
    try:
        document = json.loads(info.read_text(encoding="utf-8"))
        version, features = str(document["codebase_version"]), dict(document["features"])
        kinds = {name: str(one["dtype"]) for name, one in features.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"expected the description of a LeRobot data set: {type(error).__name__}: {error}"
        raise ImportFailed(f"{info}: {text}") from error
    if version.lstrip("v").partition(".")[0] not in ("2", "3"):
        raise ImportFailed(f"{info}: expected version 2 or 3 of LeRobot's format, got {version}")
    if "action" not in features:
        raise ImportFailed(f"{info}: expected a feature `action`, got {', '.join(features)}")
    return kinds
