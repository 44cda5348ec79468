"""A second collector on the same root ends with a message that says whose it is.

It happens under load, with another port and with the same one; the first collector goes on.
"""

from __future__ import annotations

import subprocess
import sys

from tests.faults.crash import ROOT, Traffic
from tests.faults.scenario import Scenario, Trial, Verdict

EXIT_SECONDS = 20.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Traffic(trial.folder, trial.seed, trial.program) as traffic:
        traffic.warm_up()
        pid, before = traffic.collector.process.pid, _steps(traffic)
        for number in range(trial.size):
            port = traffic.collector.port if number % 2 else 0
            _second(traffic, trial, port, verdict)
            verdict.count("second_collectors")
        process = traffic.collector.process
        verdict.require(process.poll() is None, "first_ended", f"process {pid} ended")
        verdict.require(_steps(traffic) > before, "first_stopped", "no step more than before")
        traffic.judge(verdict)
    return verdict


def _steps(traffic: Traffic) -> int:
    steps: int = traffic.collector.get("/readyz")[1]["steps"]
    return steps


def _second(traffic: Traffic, trial: Trial, port: int, verdict: Verdict) -> None:
    command = [sys.executable, *trial.program, "collect", "--root", str(traffic.root)]
    command += ["--port", str(port)]
    second = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, text = second.communicate(timeout=EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        second.kill()
        out, text = second.communicate()
    if second.returncode != 3 or "ready" in out:
        verdict.require(False, "both_run", f"status {second.returncode}: {out}{text}")
    named = f"127.0.0.1:{port}" if port else f"process {traffic.collector.process.pid}"
    verdict.require(named in text, "unclear", f"expected {named} in the message, got {text!r}")
    has_address = port or f"serves {traffic.collector.address}" in text
    verdict.require(bool(has_address), "unclear", f"expected the first one's address, got {text!r}")
    verdict.require("Traceback" not in text, "unclear", text[-300:])


SCENARIO = Scenario(
    name="two_collectors",
    law="the second collector on a root ends and names the first, which goes on",
    unit="starts",
    quick=4,
    long=20,
    planted=1,
    run=run,
)
