"""A reader that follows shards, and stores the rows read and its position in one file.

python -m tests.faults.loop.following_reader ROOT FILE (watch|poll) [MUTANT]

With `poll` no event names a new shard: the reader lists the folders at intervals.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from storage.objects.folder import FolderObjects
from storage.reading.shard_reader import ShardReader
from storage.system.files import replace_file
from tests.faults import mutants


def main(root: str, file: str, how: str, mutant: str = "") -> None:
    """Read until this process is killed."""
    if mutant:
        mutants.find(mutant).plant(mutants.Patch())
    path = Path(file)
    known = json.loads(path.read_bytes()) if path.exists() else {"rows": [], "position": None}
    with ShardReader(
        root if how == "watch" else FolderObjects(root),
        mode="fragments",
        batch_size=64,
        eager=True,
        follow=True,
        training_disabled=True,
        state=known["position"],
    ) as reader:
        while True:
            batch = reader.next(1.0)
            if not batch.count:
                continue
            columns = (batch["stream"], batch["ordinal"], batch["t"])
            known["rows"] += zip(*(column.tolist() for column in columns), strict=True)
            known["position"] = reader.state_dict()
            replace_file(path, json.dumps(known).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
