"""A following reader in its own process, for `benchmarks.following`: one line per batch.

`python -m benchmarks.follower ROOT STREAM TAKEN`: reads the parts above ordinal TAKEN. With every
batch, and for each line of its input, it prints the process's CPU seconds and the time.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from storage.reading.shard_reader import ShardReader


def main(root: Path, stream: str, taken: int) -> None:
    with ShardReader(root, batch_size=4096, follow=True, eager=True) as reader:
        state = reader.state_dict()
        ledger = {stream: [[0, taken]]}
        reader.load_state_dict({**state, "ledger": ledger})
        reader.next(0.0)
        threading.Thread(target=_answer, daemon=True).start()
        while True:
            reader.next()
            _tell("batch")


def _answer() -> None:
    for _ in sys.stdin:
        _tell("idle")


def _tell(word: str) -> None:
    print(word, time.process_time(), time.time(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
