"""`headrace up`, its processes, and a reader: the targets of loop_kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import urllib3

from tests.closing import Closing
from tests.faults.loop import ledger, process_environment
from tests.faults.loop.running_loop import PATIENCE, ROOT, STEPS, Loop, wait_until
from tests.faults.scenario import Verdict

WORDS = {"collector": "collect", "trainer": "train", "writer": "write-shards"}


class Up(Closing):
    """`headrace up` on a loop's root, with a reader of the same shards."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._env = process_environment.environment(loop.trial.mutant, loop.trace)
        self._port = 0
        self._log = (loop.folder / "up.log").open("ab")
        self._reader: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def __enter__(self) -> Up:
        self.start()
        self._loop.start_clients(self.address)
        self.restart_reader()
        return self

    def close(self) -> None:
        for process in (self._process, self._reader):
            if process is not None:
                self._kill_tree(process.pid)
                process.wait()
        self._log.close()

    # up

    def start(self) -> None:
        command = [sys.executable, "-m", "headrace", "up", "--root", str(self._loop.root), "--json"]
        command += ["--port", str(self._port), "--steps-per-version", str(STEPS)]
        self._starts += 1
        output = self._loop.folder / f"up-{self._starts}.out"
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **self._env}, stdout=out, stderr=self._log
            )
        if not wait_until(lambda: _address(output) != "", PATIENCE):
            raise RuntimeError("headrace up did not say where it collects")
        self.address = _address(output)
        self._port = int(self.address.rpartition(":")[2])

    @property
    def ended(self) -> bool:
        """Whether `up` gave up, as it does if its collector dies too often within a minute."""
        return self._process is None or self._process.poll() is not None

    def restart(self) -> None:
        """Kill `up` and its processes with SIGKILL; start another one on the same port."""
        if self._process is not None:
            self._kill_tree(self._process.pid)
            self._process.wait()
        self.start()

    @property
    def own_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def reader_pid(self) -> int | None:
        return None if self._reader is None else self._reader.pid

    def pid(self, what: str) -> int | None:
        """The process of that kind below `up`; None while there is none."""
        if self._process is None:
            return None
        for pid in _below(self._process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if WORDS[what].encode() in words and b"up" not in words:
                    return pid
        return None

    def _kill_tree(self, pid: int) -> None:
        for each in [pid, *_below(pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    # the reader

    def restart_reader(self) -> None:
        """SIGKILL of the reader, if there is one; start another one from its position."""
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()
        command = [sys.executable, "-m", "tests.faults.loop.following_reader", str(self._loop.root)]
        file = str(self._loop.folder / "read")
        self._reader = subprocess.Popen([*command, file, "watch"], cwd=ROOT)

    def _judge_reader(self, stored: list[ledger.Stored], verdict: Verdict) -> None:
        """The reader has returned every stored row once."""
        wanted = Counter(one.row for one in stored)

        def found() -> Counter[tuple[str, int, int]]:
            path = self._loop.folder / "read"
            rows = json.loads(path.read_bytes())["rows"] if path.exists() else []
            return Counter((str(s), int(o), int(t)) for s, o, t in rows)

        wait_until(lambda: found() == wanted, PATIENCE)
        rows = found()
        missing, twice = wanted - rows, rows - wanted
        verdict.counts["read_by_reader"] = rows.total()
        text = f"{missing.total()} rows: {list(missing)[:3]}"
        verdict.require(not missing, "unread", f"a reader has not read {text}")
        verdict.require(not twice, "read_twice", f"a reader has {twice.total()} rows twice")

    # the end

    def judge(self, verdict: Verdict) -> None:
        """Let clients end their episodes, stop `up`, and check the ledger by row."""
        loop, process = self._loop, self._process
        loop.stop_clients()
        if process is None:
            return
        wait_until(self._drained, PATIENCE)
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = -1
        verdict.require(status == 0, "drain", f"up: expected exit status 0, got {status}")
        result = loop.read_all(verdict)
        loop.judge_rows(result, verdict)
        self._judge_reader(ledger.rows_at_rest(loop.root, loop.originals), verdict)

    def _drained(self) -> bool:
        """Whether the episodes of killed clients are over, and in shards."""
        try:
            counts = urllib3.request("GET", f"{self.address}/readyz", timeout=5.0).json()
        except urllib3.exceptions.HTTPError:
            return False
        return bool(counts["episodes_open"] == counts["bytes_waiting"] == 0)


def _address(output: Path) -> str:
    """Wait for the address that `up` prints."""
    for line in output.read_text().splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if "collect" in document:
                return str(document["collect"]["address"])
    return ""


def _below(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_below(child)]
    return found
