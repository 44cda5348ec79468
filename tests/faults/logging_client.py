"""A process of clients for the tests of kills: log episodes, and note what was acknowledged.

    python -m tests.faults.logging_client ADDRESS FOLDER NUMBER...

Every step has a reward that no other step of any client has. Each line of FOLDER/notes-NUMBER is a
JSON object of the rewards of a batch: `sent` before it goes out, `acknowledged` once its answer
came. A client sends a batch again, unchanged, until it is answered. It ends what it began and
leaves once FOLDER/stop exists.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import urllib3

MSGPACK = {"content-type": "application/msgpack"}
AGAIN_SECONDS = 0.02
PACE_SECONDS = 0.01  # clients that never pause leave a small machine nothing to restart with


class LoggingClient:
    """One client instance and up to three open episodes."""

    def __init__(self, address: str, file: Path, number: int) -> None:
        self._address, self._file, self._number = address, file, number
        self._pool = urllib3.PoolManager(retries=False, timeout=5.0)
        self._random = random.Random(number)
        self._open: dict[str, int] = {}  # episode -> next seq
        self._starts = 0
        self._steps = 0
        self._instance: str = self._post("/v1/instances", {})["instance"]

    def _post(self, path: str, body: Any) -> Any:
        data = msgspec.msgpack.encode(body)
        while True:
            try:
                answer = self._pool.request(
                    "POST", self._address + path, body=data, headers=MSGPACK
                )
            except urllib3.exceptions.HTTPError:
                threading.Event().wait(AGAIN_SECONDS)
                continue
            if answer.status < 300:
                return msgspec.msgpack.decode(answer.data)
            threading.Event().wait(AGAIN_SECONDS)

    def turn(self, *, last: bool = False) -> None:
        """One batch: some events of some episodes."""
        events: list[dict[str, Any]] = []
        rewards: list[float] = []
        for name in list(self._open) if last else [*self._open, *self._begin(events)]:
            for _ in range(self._random.choice((0, 1, 1, 4))):
                rewards.append(self._reward())
                events.append(self._event("log_action", name, reward=rewards[-1], **_STEP))
            if last or self._random.random() < 0.4:
                events.append(self._event("end", name))
                del self._open[name]
        self._note("sent", rewards)
        answer = self._post("/v1/events", {"instance": self._instance, "events": events})
        self._note("acknowledged", rewards)
        if answer.get("refused"):
            self._note("refused", answer["refused"])

    def _begin(self, events: list[dict[str, Any]]) -> Iterator[str]:
        while len(self._open) < 3:
            name = f"{self._number}-{self._starts}"
            events.append({"type": "start", "episode_id": name, "start": self._starts})
            self._open[name] = 1
            self._starts += 1
            yield name

    def _event(self, kind: str, name: str, **content: Any) -> dict[str, Any]:
        seq = self._open[name]
        self._open[name] = seq + 1
        return {"type": kind, "episode_id": name, "seq": seq, **content}

    def _reward(self) -> float:
        self._steps += 1
        return self._number * 1e6 + self._steps

    def _note(self, what: str, items: list[Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({what: items}) + "\n")


_STEP = {"obs": [0.0, 1.0, 2.0, 3.0], "action": 1}


def log(address: str, folder: Path, number: int) -> None:
    """One client, until it is told to stop."""
    client = LoggingClient(address, folder / f"notes-{number}", number)
    while not (folder / "stop").exists():
        client.turn()
        threading.Event().wait(PACE_SECONDS)
    client.turn(last=True)


def main(address: str, folder: str, *numbers: str) -> None:
    clients = [
        threading.Thread(target=log, args=(address, Path(folder), int(number)))
        for number in numbers
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
