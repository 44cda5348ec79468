"""A trainer process for kill tests: one file holds its position and the steps that it read.

python -m tests.ingest.killed_trainer ROOT PORT CHECKPOINT [forgetful]

The checkpoint is replaced after every batch, as a learner's would be. It holds the rewards of all
steps read and the reader's state. A `forgetful` trainer restarts without the state.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from headrace import PolicyServerInput
from storage.declarations.declaration import PolicyDeclaration
from storage.spaces.descriptors import parse_space
from storage.system.files import replace_file

RULES = PolicyDeclaration(
    observation=parse_space("box:4"),
    action=parse_space("discrete:2"),
    part_steps=3,
    seal_seconds=0.3,
)


def main(root: str, port: str, checkpoint: str, kind: str = "") -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    path = Path(checkpoint)
    known: dict[str, Any] = {"read": [], "state": None}
    if path.exists():
        known = json.loads(path.read_bytes())
    with PolicyServerInput(
        None,
        "127.0.0.1",
        int(port),
        0.1,
        max_sample_queue_size=2,  # some parts come from their shards
        root=root,
        policies=RULES,
        state=None if kind == "forgetful" else known["state"],
    ) as inputs:
        print("ready", inputs.address, flush=True)
        while not stop.is_set():
            batch = inputs.next()
            if batch.count:
                known["read"] += batch["rewards"].tolist()
                known["state"] = inputs.state_dict()
                replace_file(path, json.dumps(known).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
