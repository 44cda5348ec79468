"""SIGKILL of the collector under clients that repeat old calls, by `Idempotency-Key`.

Their episodes stay open while their parts are sealed, so that most keys have outlived the journal's
rows and are known only from the journal's state. No repeated call may count as new.
"""

from __future__ import annotations

from tests.faults.loop import ledger
from tests.faults.loop.running_loop import Loop, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

ROWS = 40  # logged between two kills: several shards
PATIENCE = 90.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial, clients=("keyed-0", "keyed-1")) as loop:
        _log_on(loop, verdict)
        for _ in range(trial.size):
            if not trial.in_time:
                break
            loop.end_collector()
            loop.collector.restart()
            verdict.count("kills")
            _log_on(loop, verdict)
        loop.stop_clients()
        loop.drain(verdict)
        ledger.judge_stored(ledger.Notes.of(loop.folder), ledger.rows_at_rest(loop.root), verdict)
    return verdict


def _log_on(loop: Loop, verdict: Verdict) -> None:
    """Wait for some more shards; clients repeat earlier calls meanwhile."""
    rows, shards = loop.answers(), len(loop.shards())

    def more() -> bool:
        return loop.answers() >= rows + ROWS and len(loop.shards()) > shards + 2

    verdict.require(wait_until(more, PATIENCE), "stuck", "no events are taken any more")


SCENARIO = Scenario(
    name="keyed_retries",
    law="a call that comes again with its Idempotency-Key counts once, however long ago it was "
    "and whatever was killed since",
    unit="kills",
    quick=4,
    long=60,
    planted=2,
    run=run,
    seconds=40.0,
)
