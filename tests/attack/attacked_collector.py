"""A collector that is attacked while a bystander uses it, and the measurements of both.

The invariants of every attack: no answer of 500 and above, no hang, no exit of the process; its
memory grows by 32 MB at most; a well-behaved client is served, and hardly slower: the p99 of its
calls under attack is at most three times that of the quiet window before it, in the median over
pairs of windows. Other load on the machine affects both windows of a pair, or only one of several
pairs: with fewer than three pairs the run is not judged, which is a violation of its own.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import urllib3

from ingest.web.cost_limits import MAX_HELD_SECONDS, MAX_WAIT_SECONDS
from tests.closing import Closing
from tests.collector_process import CollectorProcess, declare
from tests.faults.scenario import Trial, Verdict

MAX_GROWTH_MB = 32.0
ANSWER_SECONDS = MAX_HELD_SECONDS + MAX_WAIT_SECONDS + 4.0
STARVED_SECONDS = 2.0
MAX_SLOWER = 3.0
FEWEST_CALLS = 100
QUIET_SECONDS = 2.0
PAUSE_SECONDS = 0.002
PAIRS = 3

C = TypeVar("C")
Window: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """One hostile request. `allowed`: statuses of 500 and above that are correct for it."""

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()


class Arena(Closing):
    """The collector, the bystander, and their measurements so far."""

    def __init__(
        self,
        trial: Trial,
        verdict: Verdict,
        *,
        options: Sequence[str] = (),
        program: Sequence[str] = (),
        observation: str = "box:4",
    ) -> None:
        self.verdict = verdict
        self.random = random.Random(trial.seed)
        self._calls = trial.folder / "bystander"
        root = trial.folder / "root"
        declare(root, observation=observation)
        self.collector = CollectorProcess(
            root, program=program or trial.program, options=options, log=trial.folder / "log"
        )
        command = [sys.executable, "-m", "tests.attack.bystander"]
        if observation == "box:4":
            command += [self.collector.address, str(self._calls)]
            self._bystander: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, cwd=Path(__file__).parents[2]
            )
        else:
            self._bystander = None
        self._pool = urllib3.PoolManager(retries=False, timeout=ANSWER_SECONDS)
        self._pairs: list[tuple[Window, Window]] = []
        self._before = 0.0

    def close(self) -> None:
        if self._bystander is not None:
            self._bystander.kill()
            self._bystander.wait()
        self.collector.close()

    # --- attacking -------------------------------------------------------------------------

    def strike(self, case: Case) -> int:
        """Send one case and check its answer; return the status, 0 for none."""
        return self.ask(case)[0]

    def ask(self, case: Case) -> tuple[int, bytes]:
        """As `strike`, but also return the answer."""
        self.verdict.count("sent")
        began = time.monotonic()
        try:
            response = self._pool.request(
                case.method,
                self.collector.address + case.path,
                body=case.body,
                headers={"content-type": "application/json", **case.headers},
                redirect=False,
            )
        except urllib3.exceptions.TimeoutError:
            self.verdict.require(False, "hang", case.name)
            return 0, b""
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            self.verdict.count("cut off")
            self.verdict.require(self.alive, "died", f"{case.name}: {error!r}")
            return 0, b""
        took = time.monotonic() - began
        slowest = self.verdict.counts.get("slowest_ms", 0.0)
        self.verdict.counts["slowest_ms"] = max(slowest, took * 1000)
        fine = response.status < 500 or response.status in case.allowed
        self.verdict.require(fine, "5xx", f"{case.name}: {response.status} {response.data[:200]!r}")
        return response.status, response.data

    @property
    def alive(self) -> bool:
        return self.collector.process.poll() is None

    def metric(self, name: str) -> float:
        """One sample of /metrics."""
        text = self._pool.request("GET", f"{self.collector.address}/metrics").data.decode()
        for line in text.splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def rss(self, what: str = "VmRSS") -> float:
        """Resident memory of the collector, in MB; "VmHWM" gives its peak."""
        for line in Path(f"/proc/{self.collector.process.pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) / 1000
        raise ProcessLookupError("the collector is gone")

    def growth(self) -> float:
        """The collector's growth since `begin`, in MB."""
        return self.rss() - self._before

    def peak(self) -> float:
        """The collector's largest momentary growth since `begin`, in MB."""
        return self.rss("VmHWM") - self._before

    def rounds(self, cases: Sequence[Case], trial: Trial, pairs: int = PAIRS) -> None:
        """Run all cases in pairs of windows; a first pass over some of them is warm-up."""
        self.verdict.count("cases", len(cases))
        for case in self.random.sample(cases, min(40, len(cases))):
            self.strike(case)
        self.begin()

        def strike(case: Case) -> None:
            self.strike(case)
            threading.Event().wait(PAUSE_SECONDS)

        self.windows(cases, trial, strike, pairs)

    def windows(
        self, cases: Sequence[C], trial: Trial, attack: Callable[[C], None], pairs: int = PAIRS
    ) -> None:
        """An attack with each case, in as many paired windows.

        A run with a deadline divides its time among the windows, so that their number stays the
        same.
        """
        for number in range(pairs):
            now = time.monotonic()
            until = max(now + 2 * QUIET_SECONDS, now + (trial.deadline - now) / (pairs - number))
            volley = [partial(attack, case) for case in cases[number::pairs]]
            self.pair(partial(_volley, volley, until))

    def at_once(self, cases: Sequence[Case]) -> None:
        """Send all of them at the same time, each on its own connection."""
        threads = [threading.Thread(target=self.strike, args=(case,)) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # --- watching --------------------------------------------------------------------------

    def begin(self) -> None:
        """Measure memory from here on."""
        self.metric("headrace_ready")
        self._before = self.rss()

    def pair(self, attack: Callable[[], None], *, again: bool = False) -> None:
        """A quiet window, then one with an attack; `again` repeats the attack until its end."""
        quiet = time.monotonic()
        threading.Event().wait(QUIET_SECONDS)
        began = time.monotonic()
        attack()
        while again and time.monotonic() - began < QUIET_SECONDS:
            attack()
        self._pairs.append(((quiet, began), (began, time.monotonic())))

    def judge(self) -> None:
        """Check the collector and the bystander at the end."""
        require = self.verdict.require
        require(self.alive, "died", "the collector is gone")
        if not self.alive:
            return
        require(self.collector.get("/healthz")[0] == 200, "died", "it is not healthy")
        errors = self.metric("headrace_internal_errors_total")
        require(errors == 0, "5xx", f"{errors:.0f} answers of 500")
        growth = self.growth()
        self.verdict.counts["growth_mb"] = growth
        require(growth <= MAX_GROWTH_MB, "memory", f"grew by {growth:.1f} MB")
        if self._bystander is not None:
            self._judge_bystander()

    def _judge_bystander(self) -> None:
        lines = [line.split() for line in self._calls.read_text().splitlines()]
        calls = [(float(at), float(took), status) for at, took, status in (x for x in lines)]
        odd = [call for call in calls if call[2] not in ("200", "201")]
        self.verdict.count("bystander_calls", len(calls))
        self.verdict.require(not odd, "starved", f"{len(odd)} calls failed, such as {odd[:3]}")
        slow = [took for _, took, _ in calls if took > STARVED_SECONDS]
        self.verdict.require(not slow, "starved", f"calls took {slow[:3]} seconds")
        ratios: list[float] = []
        for quiet, attacked in self._pairs:
            before = p99(calls, quiet)
            during = p99(calls, attacked, fewest=1 if lasts(attacked) else FEWEST_CALLS)
            if before and during:
                ratios.append(during / before)
        judge_ratios(self.verdict, ratios)


def _volley(attacks: Iterable[Callable[[], None]], until: float) -> None:
    for attack in attacks:
        if time.monotonic() > until:
            return
        attack()


def judge_ratios(verdict: Verdict, ratios: Sequence[float]) -> None:
    """The ratio of latencies under attack, pair by pair; pairs with too few calls do not count."""
    verdict.count("pairs", len(ratios))
    verdict.require(len(ratios) >= PAIRS, "unjudged", f"{len(ratios)} pairs of {PAIRS}: {ratios}")
    if len(ratios) >= PAIRS:
        ratio = statistics.median(ratios)
        verdict.counts["p99_ratio"] = ratio
        verdict.require(ratio <= MAX_SLOWER, "slowed", f"{ratios} times slower")


def lasts(window: Window) -> bool:
    """Whether a window is long enough for its calls: fewer calls then mean slow ones."""
    return window[1] - window[0] >= QUIET_SECONDS


def p99(
    calls: Iterable[tuple[float, float, str]], window: Window, fewest: int = FEWEST_CALLS
) -> float | None:
    """The 99th percentile of the times of the calls that ended within a window, in seconds."""
    took = sorted(seconds for at, seconds, _ in calls if window[0] <= at <= window[1])
    return took[int(len(took) * 0.99)] if len(took) >= fewest else None


@contextlib.contextmanager
def arena(trial: Trial, **given: object) -> Iterator[Arena]:
    """An arena whose verdict is complete when the block ends."""
    with Arena(trial, Verdict(), **given) as made:  # type: ignore[arg-type]  # passed on
        yield made
        made.judge()
