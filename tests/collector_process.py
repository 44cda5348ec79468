"""A real collector process on a real port, for tests that need one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import urllib3

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import parse_space
from tests.closing import Closing
from tests.collector_template import Forked, template

PLAIN = "tests.plain_collector"
READY_SECONDS = 60
DRAIN_SECONDS = 60.0
"""So long a stop waits for shards, so that they are there on a busy machine too."""


def declare(
    root: Path, observation: str = "box:4", action: str = "discrete:2", **rules: Any
) -> None:
    """Declare the policy `default` with short sealing times."""
    rules = {"seal_seconds": 0.2, **rules}
    save_declaration(
        root,
        PolicyDeclaration(
            observation=parse_space(observation), action=parse_space(action), **rules
        ),
    )


class CollectorProcess(Closing):
    """`python -m tests.plain_collector collect` on a root; `kill` is SIGKILL, `stop` is SIGTERM.

    `program` runs instead of `-m` PLAIN; without it and `env` the process is forked from one that
    has loaded the modules, and calls `plant()` of the module named by `plant`. `options` are
    further options of `collect`; `ca` is the authority that `request` trusts; `log` receives the
    stderr of the process. With `supervise` the serving process is the child of `process`, and is
    replaced after `kill_serving`.
    """

    def __init__(
        self,
        root: Path,
        *,
        port: int = 0,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] | None = None,
        plant: str = "",
        options: Sequence[str] = (),
        ca: Path | None = None,
        log: Path | None = None,
        supervise: bool = False,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self.root = root
        self.supervise = supervise
        self.port = port
        self._options = ["--limit", f"drain_seconds={drain_seconds}", *options]
        self._log = log
        self._program, self._plant = program, plant
        self._env = env
        self._pool = urllib3.PoolManager(
            retries=False, timeout=120.0, ca_certs=None if ca is None else str(ca)
        )
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[str] | Forked:
        words = ["collect", "--root", str(self.root), "--port", str(self.port), *self._options]
        words += ["--supervise"] if self.supervise else []
        with contextlib.ExitStack() as files:
            stderr = 2 if self._log is None else files.enter_context(self._log.open("a")).fileno()
            process: subprocess.Popen[str] | Forked
            if self._program is None and self._env is None:
                process = template().fork(words, stderr, self._plant)
            else:
                process = subprocess.Popen(
                    [sys.executable, *(self._program or ("-m", PLAIN)), *words],
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env={**os.environ, **(self._env or {})},
                    cwd=Path(__file__).parent.parent,
                )
        self._hear(process)
        return process

    def _hear(self, process: subprocess.Popen[str] | Forked) -> None:
        """Wait until the collector reports that it is ready."""
        if process.stdout is None:
            raise RuntimeError("the collector has no output")
        line = process.stdout.readline()
        if not line.startswith("ready "):
            process.stdout.close()
            process.wait(READY_SECONDS)
            raise RuntimeError(f"the collector did not start: {line!r}")
        self.address = line.split()[1]
        self.port = int(self.address.rpartition(":")[2])

    def restart(self) -> None:
        """Start again on the same port, after `kill` or `stop`."""
        self.process = self._spawn()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        if self.supervise and self.process.stdout is not None:
            select.select([self.process.stdout], [], [], READY_SECONDS)  # the end, by its child
        self.wait()

    def kill_serving(self) -> None:
        """SIGKILL of the process that serves; waits until its supervisor's next one is ready."""
        os.kill(self.serving_pid(), signal.SIGKILL)
        self._hear(self.process)

    def serving_pid(self) -> int:
        """The process id of the serving process: the supervisor's only child, if there is one."""
        if not self.supervise:
            return self.process.pid
        return next(iter(_children(self.process.pid)), 0)  # 0: during a restart

    def stop(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process has ended, by itself or by a signal; return the exit status."""
        code = self.process.wait(DRAIN_SECONDS + READY_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def turn_clock(self) -> None:
        """Let the collector's time-outs see that an hour has passed; it must have been forked."""
        os.kill(self.serving_pid(), signal.SIGUSR1)
        self.get("/healthz")  # answered after the signal, and so two are never taken for one

    def await_abandoned(self, episode_id: str) -> None:
        """Wait until the collector has closed an episode because nothing came of it any more."""
        pause = threading.Event()
        while self.get(f"/v1/episodes/{episode_id}")[1]["state"] != "abandoned":
            pause.wait(0.02)

    def writer_pid(self) -> int | None:
        """The process id of the shard writer, the collector's only child."""
        found = _children(self.serving_pid())
        return found[0] if found else None

    def started_writer(self) -> int:
        """The same once it is the writer; just after the fork it looks like the collector."""
        while self.get("/healthz")[0] == 200:
            writer = self.writer_pid()
            names = (Path(f"/proc/{writer}/{name}") for name in ("cmdline", "comm"))
            if writer and any(b"write-shards" in name.read_bytes() for name in names):
                return writer
        raise RuntimeError("the collector failed")

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """(status, decoded JSON); `body` is JSON unless it is bytes."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        response = self._pool.request(method, self.address + path, body=data, headers=given)
        return response.status, json.loads(response.data)

    def settle(self, steps: int, **headers: str) -> None:
        """Wait until so many steps are in shards; on a busy machine a drain may leave some."""
        pause = threading.Event()
        while self.request("GET", "/readyz", None, headers)[1]["steps_in_shards"] < steps:
            pause.wait(0.02)

    def empty(self, seconds: float) -> bool:
        """Wait, up to a limit, until every episode has ended and all its steps are in shards."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.1)):
            counts = self.get("/readyz")[1]
            waiting = ("episodes_open", "steps_awaiting_rewards", "bytes_waiting")
            if not any(counts[name] for name in waiting):
                return True
            pause.wait(0.1)
        return False

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        return self.request("POST", path, {} if body is None else body, headers)

    def get(self, path: str) -> tuple[int, Any]:
        return self.request("GET", path)

    def close(self) -> None:
        self._pool.clear()
        if self.process.poll() is None:
            self.process.kill()
            self.wait()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            found += map(int, path.read_text().split())
    return found


def shard_rows(root: Path) -> list[dict[str, Any]]:
    """Every row of every shard under a root, as plain pandas reads it."""
    import pandas as pd  # noqa: PLC0415 - only tests that look at shards need it

    frames = [pd.read_parquet(path) for path in sorted(root.glob("shards/*/*.parquet"))]
    return pd.concat(frames).to_dict("records") if frames else []
