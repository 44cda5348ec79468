"""`make faults`: every scenario on this build, then on the broken builds that it has to catch.

    python -m tests.faults                                  # all of it, quick
    python -m tests.faults --long                           # every scenario on this build, in full
    python -m tests.faults crash --seed 3 --long            # one scenario on this build
    python -m tests.faults crash --mutant no-dedup          # ... on a planted broken build

One JSON line a run; docs/faults.md explains it. The exit status is 1 when a verdict is not `held`
or, for a broken build, `caught`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults import mutants, scenario
from tests.faults.mutants import Mutant
from tests.faults.scenario import Scenario, Trial, Verdict

SEED = 7
EVERY = (*scenario.NAMES, *scenario.LOOP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested scenarios; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("scenario", nargs="?", help="one of these: " + ", ".join(EVERY))
    parser.add_argument("--mutant", help="a planted broken build; see tests/faults/planted.py")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--long", action="store_true")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are stopped
    # Restarted collectors find their byte code, as in production.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    good = True
    for chosen, mutant in runs(given.scenario, given.mutant, pairs=not given.long):
        line = run(chosen, mutant, given.seed, long=given.long)
        print(json.dumps(line), flush=True)
        good = good and line["verdict"] in ("held", "caught")
    return 0 if good else 1


def runs(
    name: str | None, mutant: str | None, *, pairs: bool = True
) -> Iterator[tuple[Scenario, Mutant | None]]:
    """The requested runs, in order. `pairs`: also run the broken builds of each scenario."""
    names = EVERY if name is None else (name,)
    if mutant is None:
        for each in names:
            yield scenario.load(each), None
    if mutant is None and (name is not None or not pairs):
        return
    for broken in mutants.every().values() if mutant is None else [mutants.find(mutant)]:
        for each in broken.symptoms if name is None else names:
            if mutant is not None or each in EVERY:  # `make attack` runs the others
                yield scenario.load(each), broken


def run(
    chosen: Scenario, mutant: Mutant | None, seed: int, *, long: bool = False
) -> dict[str, Any]:
    """One run, and its line of output. Its files are kept if it fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{chosen.name}-"))
    began = time.monotonic()
    size = chosen.planted if mutant else chosen.long if long else chosen.quick
    deadline = float("inf") if long or mutant else began + chosen.seconds
    try:
        symptoms = frozenset() if mutant is None else mutant.symptoms_of(chosen.name)
        verdict = chosen.run(Trial(seed, folder, size, mutant, deadline, symptoms))
        word = judge(chosen, mutant, verdict)
    except Exception:  # a scenario that crashes proves nothing about the build
        verdict = Verdict(faults={"error": [traceback.format_exc()]})
        word = "error"
    line = {
        "scenario": chosen.name,
        "mutant": mutant.name if mutant else None,
        "verdict": word,
        "seed": seed,
        "size": size,
        "unit": chosen.unit,
        "counts": {name: round(number, 3) for name, number in verdict.counts.items()},
        "faults": verdict.faults,
        "seconds": round(time.monotonic() - began, 1),
    }
    if word in ("held", "caught"):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        line["folder"] = str(folder)
    return line


def judge(chosen: Scenario, mutant: Mutant | None, verdict: Verdict) -> str:
    """held or failed; caught or missed on a broken build, which has to show its own symptom."""
    if mutant is None:
        return "held" if verdict.ok else "failed"
    kinds = mutant.symptoms_of(chosen.name) or verdict.faults.keys()
    return "caught" if kinds & verdict.faults.keys() else "missed"


if __name__ == "__main__":
    sys.exit(main())
