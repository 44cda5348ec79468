"""schemathesis over `/openapi.json`: requests that the description allows or forbids.

No answer has a status of 500 or above, or an undescribed status, content type or body.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from functools import partial

from tests.attack.attacked_collector import Arena, arena
from tests.attack.hostile_values import OPEN
from tests.attack.json_bodies import open_episode
from tests.faults.scenario import Scenario, Trial, Verdict

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)
GENERATED = re.compile(r"(\d+) generated, (\d+) (?:unique )?\w+")


def examine(place: Arena, examples: int, seed: int, phase: str, *more: str) -> None:
    """Run one phase of schemathesis in its own process; its report is the violation."""
    command = [sys.executable, "-m", "schemathesis.cli"]
    settings = place.collector.root.parent / "schemathesis.toml"
    settings.write_text(f'[parameters]\n"path.id" = "{OPEN}"\n' if more else "")
    command += ["--config-file", str(settings), "run"]
    command += [f"{place.collector.address}/openapi.json", "--no-color", "--checks", CHECKS]
    command += ["--max-examples", str(examples), "--seed", str(seed)]
    command += ["--phases", phase, "--generation-database", "none"]
    # Arrow streams are attacked by `arrow_streams`, which can make them.
    command += ["--exclude-path", "/v1/steps", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = GENERATED.search(done.stdout)
    place.verdict.count("cases", int(found[1]) if found else 0)
    place.verdict.require(found is not None, "error", done.stdout[-300:] + done.stderr[-300:])
    failures = done.stdout.partition("FAILURES ===")[2] or done.stdout.partition("ERRORS ===")[2]
    place.verdict.require(done.returncode == 0, "undescribed", failures.strip("= \n"))


def run(trial: Trial) -> Verdict:
    with arena(trial) as place:
        open_episode(place)
        place.begin()
        for more in ((), ("--exclude-path", "/v1/episodes/{id}/end")):
            for phase in ("coverage", "fuzzing"):  # each in its own pair of windows
                place.pair(partial(examine, place, trial.size, trial.seed, phase, *more))
        threading.Event().wait(0.5)
    return place.verdict


SCENARIO = Scenario(
    name="schema",
    law="the collector does what /openapi.json says, whatever it is sent",
    unit="examples",
    quick=5,
    long=50,
    planted=3,
    run=run,
)
