"""The formats by name, and how their options join those of the user."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ingest.importing.engine import Workspace
from ingest.importing.formats.recipes import Recipe
from ingest.importing.options import ImportOptions
from ingest.importing.sources import Unit
from ingest.protocol.errors import ImportFailed

FORMATS = {
    "cb_json": "vw",
    "d3rlpy": "hdf5",
    "d4rl": "hdf5",
    "dsjson": "vw",
    "headrace": "shards",
    "lerobot": "lerobot",
    "minari": "hdf5",
    "obd": "obd",
    "rllib": "rllib_batches",
    "rllib-episodes": "rllib_episodes",
}
"""Name -> the module with its function `NAME(path, options, space)`."""


def opened_format(
    options: ImportOptions, space: Workspace
) -> tuple[ImportOptions, list[Unit], Sequence[str]]:
    """(the options with the format's columns, its units, what the user should know).

    Raises ImportFailed.
    """
    name = str(options.format)
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ImportFailed(f"format: expected one of {', '.join(FORMATS)}, got {name!r}{hint}")
    if not isinstance(options.source, (str, Path)) or options.query is not None:
        raise ImportFailed(f"format {name}: expected a file or a folder as the source")
    path = Path(options.source)
    if not path.exists():
        raise ImportFailed(f"{path}: expected a file or a folder, got none")
    module = importlib.import_module(f"{__package__}.{FORMATS[name]}")
    opens: Callable[[Path, ImportOptions, Workspace], Recipe]
    opens = getattr(module, name.replace("-", "_"))
    found = opens(path, options, space)
    completed = options.completed(found.options)
    if not completed.is_complete:
        lacks = [one for one in ("observation", "action", "reward") if not getattr(completed, one)]
        raise ImportFailed(f"{path}: expected columns of the {' and '.join(lacks)}, got none")
    return completed, found.units, found.notes
