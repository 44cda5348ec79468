"""Trainers that start immediately: forked from a process that has loaded their modules.

    python -m tests.faults.loop.trainer_forks [MUTANT]

Each line of its input is a JSON object: `argv` of the command `headrace`, `out` and `err`, files
for its output, `status`, a file for its exit status, and optionally `witness` and `strike`, for
`trainer_witness` and `file_call_strikes`. It replies with the process id, and exits at the end of
its input.

Most of a start is imports: without forks, a hundred kills would take an hour on a busy machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq
import torch

import headrace.__main__
import headrace.cli.learning
import headrace.output.console
import headrace.output.results
from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig
from policy.networks.policy import Policy
from policy.training import train_live
from storage.system.process import die_with_parent
from tests.faults import mutants
from tests.faults.loop import file_call_strikes, trainer_witness
from tests.faults.loop.running_loop import SPEC

PRELOADED = (
    headrace.cli.learning,
    headrace.output.console,
    headrace.output.results,
    pq,
    train_live,
)


def main(mutant: str = "") -> None:
    planted = mutants.find(mutant) if mutant else None
    torch.set_num_threads(1)
    Learner(Policy(SPEC), PPOConfig())  # the first one imports for seconds
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    print("ready", flush=True)
    parent = os.getpid()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            die_with_parent(parent)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(json.loads(line), planted)
        print(child, flush=True)


def _run(order: dict[str, Any], planted: mutants.Mutant | None) -> NoReturn:
    status = 70
    for name, number in (("/dev/null", 0), (order["out"], 1), (order["err"], 2)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(name, flags, 0o644), number)
    try:
        if order.get("witness"):
            trainer_witness.begin(Path(order["witness"]))
        if planted is not None:
            planted.plant(mutants.Patch())
        if order.get("strike"):
            file_call_strikes.begin(**order["strike"])
        sys.argv = ["headrace", *order["argv"]]
        try:
            headrace.__main__.main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        sys.stdout.flush()
        sys.stderr.flush()
        Path(order["status"]).write_text(str(status))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        Path(order["status"]).write_text("70")
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
