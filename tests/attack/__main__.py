"""`make attack`: every attack on this build, a JSON line each; then on builds that must fail.

    python -m tests.attack                    # in full
    python -m tests.attack --quick            # a minute each at most

The lines are those of `python -m tests.faults`, which runs a single attack by its name, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tests.faults import mutants, scenario
from tests.faults.__main__ import SEED, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all attacks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    good = True
    for name in scenario.ATTACKS:
        line = run(scenario.load(name), None, given.seed, long=not given.quick)
        print(json.dumps(line), flush=True)
        good = good and line["verdict"] == "held"
    for mutant in mutants.every().values():
        for name in set(mutant.symptoms) & set(scenario.ATTACKS):
            line = run(scenario.load(name), mutant, given.seed)
            print(json.dumps(line), flush=True)
            good = good and line["verdict"] == "caught"
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
