"""A short crash scenario: SIGKILL of the collector, its writer and its clients under traffic."""

from __future__ import annotations

import random
from pathlib import Path

from tests.collector_template import HOUR
from tests.faults.crash import Traffic, verify


def test_twenty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    """Kills of collector, writer and clients: everything acknowledged is stored exactly once."""
    targets = ["collector"] * 8 + ["writer"] * 6 + ["client"] * 6
    random.Random(7).shuffle(targets)
    with Traffic(tmp_path, 7, None, episode_timeout=HOUR / 2, ranks=True) as traffic:
        traffic.warm_up()
        for target in targets:
            traffic.kill(target)
        assert traffic.settle() == 0
        account = traffic.account()
    assert (account.lost, account.doubled, account.unknown) == ([], [], [])
    assert (account.refused, account.partial, account.misplaced) == ([], [], [])
    assert len(account.acknowledged) > 200
    assert verify(traffic.root) == (0, [])
