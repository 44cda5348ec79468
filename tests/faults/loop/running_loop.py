"""A running loop: a collector, clients, and a trainer that scenarios kill, stop and starve.

No verdict depends on seconds: conditions are awaited with generous limits, and one that never
becomes true is `stuck`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.inference.spec import ModuleSpec, PolicySpec
from storage.spaces.descriptors import parse_space
from storage.system.files import FileLock
from tests.closing import Closing
from tests.collector_process import CollectorProcess, declare
from tests.faults.loop import ledger, process_environment
from tests.faults.loop.ledger import Watch
from tests.faults.loop.trainer_witness import Testimony
from tests.faults.mutants import Mutant
from tests.faults.power_loss import is_dead
from tests.faults.scenario import Trial, Verdict

ROOT = Path(__file__).parents[3]
STEPS = 16  # of an update
SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"), ModuleSpec(hidden=(8,)))
CLIENTS = ("acting-0", "acting-1", "keyed-0")
PATIENCE = 90.0
LOOK_SECONDS = 0.02
RUNS = 5  # of trainers that read the rest
POLICY = "default"


@dataclass
class Trainer:
    """A running or ended trainer."""

    pid: int
    out: Path
    err: Path
    status: Path

    def __post_init__(self) -> None:
        try:
            self._fd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has ended already
            self._fd = -1

    @property
    def alive(self) -> bool:
        return not self.wait(0.0)

    def wait(self, seconds: float = PATIENCE) -> bool:
        """Wait for the process; return whether it ended in time."""
        if self._fd < 0:
            return True
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        os.close(self._fd)
        self._fd = -1
        return True

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        if not self.wait():
            raise TimeoutError(f"process {self.pid} survived SIGKILL")

    def exit_status(self) -> int | None:
        """The exit status; None while it runs, or if it was killed."""
        return int(self.status.read_text()) if self.status.exists() else None

    def complaint(self) -> str:
        """The last 400 characters that the process wrote to stderr."""
        return self.err.read_text()[-400:] if self.err.exists() else ""

    def messages(self) -> list[dict[str, Any]]:
        """The JSON lines that the process printed."""
        lines = []
        for line in self.out.read_text().splitlines() if self.out.exists() else []:
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def versions(self) -> list[int]:
        """The versions that the process reported as live."""
        return [int(message["version"]) for message in self.messages() if "version" in message]

    def result(self) -> dict[str, Any] | None:
        """The process's last report."""
        for message in self.messages():
            if "followed" in message:
                found: dict[str, Any] = message["followed"]
                return found
        return None


class TrainerForks:
    """See tests.faults.loop.trainer_forks."""

    def __init__(
        self, folder: Path, mutant: Mutant | None, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        command = [sys.executable, "-m", "tests.faults.loop.trainer_forks"]
        self._process = subprocess.Popen(
            [*command, *([] if mutant is None else [mutant.name])],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def start(
        self, *argv: str, witness: Path | None = None, strike: Mapping[str, Any] | None = None
    ) -> Trainer:
        """Run a command of `headrace`."""
        number = next(self._numbers)
        files = {w: self._folder / f"trainer-{number}.{w}" for w in ("out", "err", "status")}
        order: dict[str, Any] = {"argv": argv, **{w: str(path) for w, path in files.items()}}
        if witness is not None:
            order["witness"] = str(witness)
        if strike is not None:
            order["strike"] = strike
        if self._process.stdin is None:
            raise RuntimeError("the process that forks has no input")
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Trainer(int(self._answer()), **files)

    def _answer(self) -> str:
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks ended; its message stands above")
        return line.strip()

    def close(self) -> None:
        """Kill the process; its children die with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Loop(Closing):
    """A root with a collector, clients and trainers; `watch` sees the versions.

    `env` is for the trainers, and for the collector unless it has a `collector_env`; there is none,
    and no client, unless `collect`.
    """

    def __init__(
        self,
        trial: Trial,
        *,
        clients: tuple[str, ...] = CLIENTS,
        supervise: bool = False,
        env: Mapping[str, str] | None = None,
        collector_env: Mapping[str, str] | None = None,
        root: Path | None = None,
        episode_timeout: float = 120.0,
        collect: bool = True,
    ) -> None:
        self.trial = trial
        self.folder = trial.folder
        self.root = root or trial.folder / "root"
        self.chance = random.Random(trial.seed)
        self.trace = trial.folder / "witness.jsonl"
        self.watch = Watch(self.root)
        self.originals = trial.folder / "originals"
        self.originals.mkdir(exist_ok=True)
        declare(
            self.root,
            spec=SPEC.to_json(),
            steps_per_version=STEPS,
            part_steps=8,
            part_seconds=0.1,
            seal_seconds=0.1,
            episode_timeout=episode_timeout,
        )
        self.names = clients
        self._generation = 0  # of clients
        self._stack = ExitStack()
        planted = process_environment.environment(trial.mutant)
        self._env = {**planted, **((env if collector_env is None else collector_env) or {})}
        self.forks = TrainerForks(trial.folder, trial.mutant, env)
        self._stack.callback(self.forks.close)
        self.trainer: Trainer | None = None
        self.clients: dict[str, subprocess.Popen[bytes]] = {}
        if collect:
            log = trial.folder / "collector.log"
            self.collector = self._stack.enter_context(
                CollectorProcess(self.root, env=self._env, supervise=supervise, log=log)
            )
            self.start_clients(self.collector.address)

    def close(self) -> None:
        self._stack.close()

    # clients

    def start_clients(self, address: str) -> None:
        """Start all clients of a collector."""
        self._address = address
        for name in self.names:
            self.start_client(name)

    def start_client(self, name: str) -> None:
        """Start a client of this kind with an unused number."""
        kind, number = name.split("-")
        own = f"{kind}-{int(number) + 100 * self._generation}"
        command = [sys.executable, "-m", "tests.faults.loop.loop_clients", self._address]
        process = subprocess.Popen([*command, str(self.folder), own], cwd=ROOT)
        self._stack.callback(_end, process)
        self.clients[name] = process

    def replace_client(self, name: str) -> None:
        """SIGKILL of a client; another one takes its place."""
        _end(self.clients[name])
        self._generation += 1
        self.start_client(name)

    def forget_clients(self) -> None:
        """Replace all clients and forget their notes, because a copy of the root was restored."""
        for client in self.clients.values():
            _end(client)
        for path in self.folder.glob("notes-*"):
            path.rename(self.folder / f"gone-{path.name}")
        self._generation += 1
        self.start_clients(self._address)

    def stop_clients(self) -> None:
        """Let all clients end their episodes."""
        (self.folder / "stop").touch()
        for client in self.clients.values():
            client.wait(PATIENCE)
        (self.folder / "stop").unlink()

    def answers(self) -> int:
        """The number of acknowledgements that clients have noted so far."""
        notes = self.folder.glob("notes-*")
        return sum(path.read_bytes().count(b'"acknowledged"') for path in notes)

    # trainers

    def start_trainer(
        self, *, steps: int = STEPS, strike: Mapping[str, Any] | None = None, **options: str
    ) -> Trainer:
        """A follower, in the place of the one before."""
        words = [word for name, value in options.items() for word in (_option(name), value)]
        self.trainer = self.forks.start(
            *("train", "--follow", "--root", str(self.root), "--json"),
            *("--steps-per-update", str(steps), *words),
            witness=self.trace,
            strike=strike,
        )
        return self.trainer

    def live_version(self) -> int:
        """The live version; 0 while there is none, or it cannot be read."""
        try:
            live = ledger.WeightFolder(self.root, POLICY).live()
        except Exception:  # the watch reports the error
            return 0
        return live.version if live else 0

    def updates(self) -> int:
        """The number of updates that the witness recorded."""
        return self.trace.read_bytes().count(b"\n") if self.trace.exists() else 0

    def wait_for_version(self, above: int, seconds: float = PATIENCE) -> bool:
        """Whether a later version goes live in time."""
        came = wait_until(lambda: self.live_version() > above, seconds)
        self.watch.look()
        return came

    # the collector

    def end_collector(self) -> None:
        """SIGKILL of the collector; its writer dies with it."""
        writer = self.collector.writer_pid()
        self.collector.kill()
        if writer is not None:
            wait_until(lambda: is_dead(writer))

    def shards(self) -> set[Path]:
        return set(self.root.glob("shards/*/*.parquet"))

    # the end

    def judge(self, verdict: Verdict, **may: Any) -> None:
        """Stop clients and collector, let a trainer read everything, and check the ledger."""
        self.stop_clients()
        if self.trainer is not None:
            self.trainer.kill()
        self.drain(verdict)
        self.judge_rows(self.read_all(verdict), verdict, **may)

    def judge_rows(
        self,
        result: dict[str, Any] | None,
        verdict: Verdict,
        *,
        damaged: tuple[str, ...] = (),
        **may: Any,
    ) -> None:
        """Check the ledger by row.

        `result` is the report of a trainer that has read everything, `may` is for
        `ledger.judge_versions`."""
        notes = ledger.Notes.of(self.folder)
        stored, testimony = ledger.rows_at_rest(self.root, self.originals), Testimony.of(self.trace)
        ledger.judge_stored(notes, stored, verdict)
        if result is not None:
            ledger.judge_end(
                self.root, self.watch, testimony, stored, result, verdict, damaged=damaged
            )
        ledger.judge_versions(self.watch, testimony, stored, verdict, **may)

    def drain(self, verdict: Verdict) -> None:
        """SIGTERM of the collector, once the episodes of its clients are in shards."""

        def drained() -> bool:
            counts = self.collector.get("/readyz")[1]
            return bool(counts["episodes_open"] == counts["bytes_waiting"] == 0)

        wait_until(drained, 30.0)
        status = self.collector.stop()
        verdict.require(status == 0, "drain", f"expected exit status 0, got {status}")

    def read_all(self, verdict: Verdict) -> dict[str, Any] | None:
        """Run trainers, with small updates at the end, until no row is left to read.

        Return the last one's report."""
        result: dict[str, Any] | None = None
        for steps in (STEPS, *[1] * RUNS):
            result = self._read_on(verdict, steps)
            if result is None or not self._left():
                break
        return result

    def _left(self) -> bool:
        """Whether the checkpoint's position does not yet cover all rows that the policy acted."""
        stored = ledger.rows_at_rest(self.root, self.originals)
        whole = [row for row in stored if row.mine and not (self.originals / row.shard).exists()]
        position = ledger.position_of(self.root)
        return not ledger.unread_of(position, ledger.parts_of(stored)).isdisjoint(
            row.row for row in whole
        )

    def _read_on(self, verdict: Verdict, steps: int) -> dict[str, Any] | None:
        before = self._fence()
        trainer = self.start_trainer(steps=steps)
        wait_until(lambda: self._fence() > before or not trainer.alive, PATIENCE)
        quiet = _Quiet(trainer.out, trainer.err, self.trace)
        if not wait_until(lambda: quiet.for_long() or not trainer.alive, PATIENCE):
            verdict.require(False, "stuck", "a trainer that has only to read on goes on for ever")
        trainer.send(signal.SIGTERM)
        if not trainer.wait():
            verdict.require(False, "stuck", "a trainer does not end by SIGTERM")
            trainer.kill()
        result = trainer.result()
        text = f"the trainer says no result: {trainer.complaint()}"
        verdict.require(result is not None, "ended", text)
        return result

    def _fence(self) -> int:
        """The number of the latest lease; a trainer handles SIGTERM before it takes one."""
        numbers = self.root.glob(f"weights/{POLICY}/leases/*.json")
        return max((int(path.stem) for path in numbers), default=0)


def stop_between(loop: Loop, trainer: Trainer) -> None:
    """Stop a trainer at a moment when it neither holds the store's lock, which nothing could break,
    nor has numbered a version that is not live yet."""
    store = ledger.WeightFolder(loop.root, POLICY)
    lock = FileLock(store.directory / "lock")
    while True:
        trainer.send(signal.SIGSTOP)
        if lock.acquire(blocking=False):
            lock.release()
            if max(store.versions(), default=0) == loop.live_version():
                return
        trainer.send(signal.SIGCONT)
        threading.Event().wait(0.01)


class _Quiet:
    """Whether files have not grown for a while."""

    LOOKS = 100

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._sizes: list[int] = []
        self._same = 0

    def for_long(self) -> bool:
        sizes = [path.stat().st_size if path.exists() else 0 for path in self._files]
        self._same = self._same + 1 if sizes == self._sizes else 0
        self._sizes = sizes
        return self._same >= self.LOOKS


def wait_until(done: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether a condition becomes true in time. It is polled slowly, to leave the processor to the
    processes that it waits for."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(LOOK_SECONDS)
    return True


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """A process has reached its limit of open files for the duration of the block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process is stopped for the duration of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
