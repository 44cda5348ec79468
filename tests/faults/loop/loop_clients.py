"""A process of clients of a whole loop: some act by the policy, some log by `Idempotency-Key`.

    python -m tests.faults.loop.loop_clients ADDRESS FOLDER KIND-NUMBER...

KIND is `acting`, `patient` or `keyed`. Each line of FOLDER/notes-KIND-NUMBER is a JSON object:
`sent` before a request is sent, `acknowledged` once it is answered, as lists of rows. A row is
[episode, place], where the place is t for an acted step and the reward for a logged one; for an
action, the answer follows. A request is repeated unchanged until it is answered. Once FOLDER/stop
exists, all clients end their episodes and exit.

The keyed client also repeats calls that were answered long ago, as a rerun job does.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import urllib3

AGAIN_SECONDS = 0.02
PACE_SECONDS = {"acting": 0.01, "patient": 0.01, "keyed": 0.05}
EPISODES = 2  # that an acting client has open
KEYED_STEPS = 400
AGAIN = 0.6  # the share of new calls that are followed by an old one
MSGPACK = "application/msgpack"
ABANDONED = b"abandoned"


class Client:
    """Sends requests until they are answered, and notes them in a file."""

    def __init__(self, address: str, folder: Path, name: str) -> None:
        self.name = name
        self.random = random.Random(name)
        self._address = address
        self._folder = folder
        self._notes = folder / f"notes-{name}"
        self._pool = urllib3.PoolManager(retries=False, timeout=90.0)

    @property
    def stopped(self) -> bool:
        return (self._folder / "stop").exists()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The answer to a request, None for one that is refused for its content."""
        data = msgspec.msgpack.encode(body)
        headers = {"content-type": MSGPACK, "accept": MSGPACK, **headers}
        while True:
            try:
                answer = self._pool.request(
                    "POST", self._address + path, body=data, headers=headers
                )
            except urllib3.exceptions.HTTPError:
                threading.Event().wait(AGAIN_SECONDS)
                continue
            if answer.status < 300:
                return msgspec.msgpack.decode(answer.data)
            if answer.status < 500 and answer.status != 429:
                if ABANDONED in answer.data:  # the client was stopped for long: begin a new episode
                    return None
                self.note("refused", [[path, answer.status, repr(answer.data)[:200]]])
                return None
            threading.Event().wait(AGAIN_SECONDS)

    def note(self, what: str, rows: list[Any]) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps({what: rows}) + "\n")


class ActingClient(Client):
    """Two open episodes; each turn acts in both, by the policy that is live.

    `hold` is for how many seconds it waits for a newer version at most.
    """

    hold = 5.0

    def __init__(self, address: str, folder: Path, name: str) -> None:
        super().__init__(address, folder, name)
        self._episodes: dict[str, list[int]] = {}  # id -> [next seq, next t]
        self._starts = 0
        registered = self.post("/v1/instances", {})
        self._instance = registered["instance"]

    def turn(self, *, last: bool = False) -> None:
        """Rewards and ends of the actions before, new episodes, and the next actions."""
        events: list[dict[str, Any]] = []
        for name in list(self._episodes):
            self._close(events, name, last=last)
        while len(self._episodes) < EPISODES and not last:
            name = f"a{self.name}-{self._starts}"
            events.append({"type": "start", "episode_id": name, "start": self._starts})
            self._episodes[name] = [1, 0]
            self._starts += 1
        body = {"instance": self._instance, "events": events}
        if last:
            self._refused(self.post("/v1/events", body))
            return
        calls = [self._call(name) for name in self._episodes]
        self._act({**body, "actions": calls, "durable": True, "wait": self.hold})

    def _act(self, body: dict[str, Any]) -> None:
        """Request actions until each is decided; a repeated request is a retry."""
        self.note("sent", [[name, t] for name, (_, t) in self._episodes.items()])
        while True:
            answer = self.post("/v1/actions", body)
            if answer is None:
                self._episodes.clear()
                return
            self._refused(answer)
            errors = [one["error"] for one in answer["actions"] if one.get("error")]
            if all(error["code"] != "no_version" for error in errors):
                break
            if self.stopped:
                return
            threading.Event().wait(AGAIN_SECONDS)
        acknowledged = []
        for one in answer["actions"]:
            episode = self._episodes[one["episode_id"]]
            if one.get("error"):
                if one["error"]["code"] != "abandoned":
                    self.note("refused", [[one["episode_id"], one["error"]]])
                del self._episodes[one["episode_id"]]
                continue
            details = [one["action"], one["action_logp"], one["policy_version"]]
            acknowledged.append([one["episode_id"], episode[1], *details])
            episode[1] += 1
        self.note("acknowledged", acknowledged)

    def _call(self, name: str) -> dict[str, Any]:
        obs = [round(self.random.uniform(-1, 1), 3) for _ in range(4)]
        return {"episode_id": name, "obs": obs, "seq": self._next(name)}

    def _close(self, events: list[dict[str, Any]], name: str, *, last: bool) -> None:
        t = self._episodes[name][1]
        if t and self.random.random() < 0.8:
            reward = self.random.uniform(0, 1)
            event = {"type": "log_returns", "episode_id": name, "reward": reward}
            events.append({**event, "seq": self._next(name)})
        if last or (t and self.random.random() < 0.15):
            events.append({"type": "end", "episode_id": name, "seq": self._next(name)})
            del self._episodes[name]

    def _next(self, name: str) -> int:
        self._episodes[name][0] += 1
        return self._episodes[name][0] - 1

    def _refused(self, answer: Any) -> None:
        refused = answer.get("refused", []) if answer else []
        wrong = [one for one in refused if one["error"]["code"] != "abandoned"]
        if wrong:
            self.note("refused", wrong)


class PatientClient(ActingClient):
    """A client whose wait is so long that only an update releases it."""

    hold = 60.0


class KeyedClient(Client):
    """One long episode after the other, logged by calls that carry a key."""

    def __init__(self, address: str, folder: Path, name: str) -> None:
        super().__init__(address, folder, name)
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._steps = self._episodes = 0
        self._episode = ""

    def turn(self, *, last: bool = False) -> None:
        """Log a new step, and sometimes repeat an old one."""
        if last or len(self._calls) >= KEYED_STEPS:
            self._post("end", {}, f"{self._episode}-end")
            self._calls = []
            if last:
                return
        if not self._calls:
            self._episode = f"k{self.name}-{self._episodes}"
            self._episodes += 1
            self.post(
                "/v1/episodes",
                {"episode_id": self._episode},
                **{"idempotency-key": f"{self._episode}-start"},
            )
        self._steps += 1
        step = {"obs": [0.0, 0.5, 1.0, self.random.random()], "action": 1, "reward": self._steps}
        self.note("sent", [[self._episode, self._steps]])
        if not self._post("log_action", step, f"{self._episode}-{self._steps}"):
            self._calls = []
            return
        self.note("acknowledged", [[self._episode, self._steps]])
        self._calls.append((f"{self._episode}-{self._steps}", step))
        if self.random.random() < AGAIN:
            key, step = self.random.choice(self._calls)
            self._post("log_action", step, key)

    def _post(self, what: str, body: dict[str, Any], key: str) -> bool:
        path = f"/v1/episodes/{self._episode}/{what}"
        return self.post(path, body, **{"idempotency-key": key}) is not None


KINDS = {"acting": ActingClient, "patient": PatientClient, "keyed": KeyedClient}


def run(address: str, folder: Path, name: str) -> None:
    """Run one client until told to stop."""
    kind = name.partition("-")[0]
    client: Any = KINDS[kind](address, folder, name)
    while not client.stopped:
        client.turn()
        threading.Event().wait(PACE_SECONDS[kind])
    client.turn(last=True)


def main(address: str, folder: str, *names: str) -> None:
    clients = [threading.Thread(target=run, args=(address, Path(folder), name)) for name in names]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
