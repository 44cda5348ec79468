"""Run under `failing_opens.c`: what a follower and a one-shot reader do when opening fails.

`python failing_reader.py ROOT CONTROL WORD ERRNO ...`: WORD is part of the path that fails. Prints
one line of JSON for each errno: the ordinals that a follower returned during the errors and
afterwards, its statistics, and the error of a reader that gives up.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from storage.experience.interfaces import ReaderError
from storage.reading.shard_reader import ShardReader

LONG = 60.0  # s


def main(root: Path, control: Path, word: str, number: str) -> None:
    control.write_text(f"{number}\n{word}")
    with ShardReader(root, follow=True, eager=True, poll_interval=0.05) as reader:
        during = _until_caught_up(reader)
        end = time.monotonic() + LONG
        while not reader.stats.retrying and time.monotonic() < end:
            reader.next(0.01)
        retrying = dict(reader.stats.retrying)
        left_out = dict(reader.stats.excluded_shards)
        gave_up = _once(root)
        control.unlink()
        after: list[int] = []
        while not after and time.monotonic() < end:
            after += reader.next(0.1)["ordinal"].tolist()
        after += _until_caught_up(reader)
        print(
            json.dumps(
                {
                    "during": during,
                    "retrying": retrying,
                    "left_out": left_out,
                    "gave_up": gave_up,
                    "after": after,
                    "retrying_after": reader.stats.retrying,
                }
            )
        )


def _until_caught_up(reader: ShardReader) -> list[int]:
    found: list[int] = []
    while not reader.caught_up():
        batch = reader.next(0.05)
        found += batch["ordinal"].tolist() if batch.count else []
    return found


def _once(root: Path) -> str:
    try:
        with ShardReader(root, retry_for=0.2) as reader:
            for _ in reader:
                pass
    except ReaderError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    for number in sys.argv[4:]:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], number)
