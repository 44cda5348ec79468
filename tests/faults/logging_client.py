"""A process of clients for the tests of kills: log episodes, and note what was acknowledged.

    python -m tests.faults.logging_client ADDRESS FOLDER [rank] NUMBER...

Every step has a reward that no other step of any client has. Each line of FOLDER/notes-NUMBER is a
JSON object with the rewards of a batch: `sent` before it is sent, `acknowledged` once it is
answered; `episodes` gives the episode of each step; `places` gives, for each step of an episode of
two agents, its agent and its step of the environment. A client repeats a batch unchanged until it
is answered. Once FOLDER/stop exists, it ends its episodes and exits. Clients with even numbers also
log episodes of two agents. With `rank`, those with odd ones rank candidates, and reward what was
chosen: the ranking must be the same afterwards.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import urllib3

from storage.spaces.descriptors import Box, Dict, MultiBinary

MSGPACK = {"content-type": "application/msgpack"}
AGAIN_SECONDS = 0.02
PACE_SECONDS = 0.01  # clients that never pause would leave a small machine no time to restart


@dataclass
class OpenEpisode:
    """A client's record of an episode: its agents, or None for a single-agent episode."""

    agents: tuple[str | None, ...]
    seq: dict[str | None, int] = field(default_factory=dict)  # the next of each
    env_t: int = -1
    acted: set[str] = field(default_factory=set)


class LoggingClient:
    """One client instance and up to three open episodes."""

    def __init__(self, address: str, file: Path, number: int) -> None:
        self._address, self._file, self._number = address, file, number
        self._pool = urllib3.PoolManager(retries=False, timeout=5.0)
        self._random = random.Random(number)
        self._open: dict[str, OpenEpisode] = {}
        self._episodes = self._starts = 0
        self._steps = 0
        self._instance: str = self._post("/v1/instances", {})["instance"]

    def _post(self, path: str, body: Any, *, may_conflict: bool = False) -> Any:
        data = msgspec.msgpack.encode(body)
        while True:
            try:
                answer = self._pool.request(
                    "POST", self._address + path, body=data, headers=MSGPACK
                )
            except urllib3.exceptions.HTTPError:
                threading.Event().wait(AGAIN_SECONDS)
                continue
            if may_conflict and answer.status == 409:
                return {"error": answer.data.decode()}
            if answer.status < 300:
                return msgspec.msgpack.decode(answer.data)
            threading.Event().wait(AGAIN_SECONDS)

    def turn(self, *, last: bool = False) -> None:
        """One batch: some events of some episodes."""
        events: list[dict[str, Any]] = []
        if not last:
            self._begin(events)
        for name, episode in list(self._open.items()):
            for _ in range(self._random.choice((0, 1, 1, 4))):
                self._act(events, name, episode)
            if last or self._random.random() < 0.4:
                fields = {"agents": len(episode.acted)} if episode.acted else {}
                events += [self._event("end", name, agent, **fields) for agent in episode.agents]
                del self._open[name]
        acts = [event for event in events if event["type"] == "log_action"]
        rewards = [event["reward"] for event in acts]
        self._note("sent", rewards)
        self._note("episodes", [[event["reward"], event["episode_id"]] for event in acts])
        tracks = [event for event in acts if "agent_id" in event]
        self._note("places", [[e["reward"], e["agent_id"], e["env_t"]] for e in tracks])
        answer = self._post("/v1/events", {"instance": self._instance, "events": events})
        self._note("acknowledged", rewards)
        if answer.get("refused"):
            self._note("refused", answer["refused"])

    def rank(self) -> None:
        """A ranked event and its reward; a kill may come between any two requests."""
        reward = self._reward()
        name = f"ranked-{reward:.0f}"
        self._note("sent", [reward])
        first = self._post("/v1/rank", {**RANK, "event_id": name})
        rewarded = {"reward": reward, "reward_id": "r"}
        answers = [
            self._post(f"/v1/reward/{name}", rewarded, may_conflict=True),
            self._post("/v1/rank", {**RANK, "event_id": name}, may_conflict=True),
        ]
        self._note("acknowledged", [reward])
        if "error" in answers[0] or answers[1] != first:
            self._note("refused", answers)

    def _begin(self, events: list[dict[str, Any]]) -> None:
        while len(self._open) < 3:
            name = f"{self._number}-{self._episodes}"
            self._episodes += 1
            several = self._number % 2 == 0 and self._episodes % 2 == 0
            self._open[name] = OpenEpisode(AGENTS if several else (None,))
            for agent in self._open[name].agents:
                start = self._event("start", name, agent, start=self._starts)
                del start["seq"]
                events.append(start)
                self._starts += 1

    def _act(self, events: list[dict[str, Any]], name: str, episode: OpenEpisode) -> None:
        """A step of the single agent, or of the environment, in which one or both agents act."""
        episode.env_t += 1
        for agent in episode.agents if self._random.random() < 0.5 else episode.agents[:1]:
            step: dict[str, Any] = {**_STEP, "reward": self._reward()}
            if agent is not None:
                episode.acted.add(agent)
                step["env_t"] = episode.env_t
            events.append(self._event("log_action", name, agent, **step))

    def _event(self, kind: str, name: str, agent: str | None, **content: Any) -> dict[str, Any]:
        numbers = self._open[name].seq
        seq = numbers.get(agent, 0)
        numbers[agent] = seq + 1
        whose = {} if agent is None else {"agent_id": agent}
        return {"type": kind, "episode_id": name, "seq": seq, **whose, **content}

    def _reward(self) -> float:
        self._steps += 1
        return self._number * 1e6 + self._steps

    def _note(self, what: str, items: list[Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({what: items}) + "\n")


AGENTS = ("agent0", "b")  # the first has the name under which single agents are stored
RANK = {
    "policy_id": "shop",
    "context": {},
    "actions": [{"id": name, "features": [n, 1.0]} for n, name in enumerate(("hat", "sock"))],
}
SHOP = Dict({"action_mask": MultiBinary((4,)), "candidates": Box((4, 2), ragged=True)})
_STEP = {"obs": [0.0, 1.0, 2.0, 3.0], "action": 1}


def log(address: str, folder: Path, number: int, ranks: bool) -> None:
    """Log as one client until told to stop."""
    client = LoggingClient(address, folder / f"notes-{number}", number)
    while not (folder / "stop").exists():
        client.turn()
        if ranks and number % 2:
            client.rank()
        threading.Event().wait(PACE_SECONDS)
    client.turn(last=True)


def main(address: str, folder: str, *words: str) -> None:
    ranks = "rank" in words
    clients = [
        threading.Thread(target=log, args=(address, Path(folder), int(number), ranks))
        for number in words
        if number != "rank"
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
