"""The account of the spool's scenarios: where a step is that a call has promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import Refusal
from tests.collector_process import CollectorProcess, declare
from tests.collector_template import HOUR
from tests.faults.scenario import Verdict
from tests.faults.spool_kills import judge

OBS = [0.0, 1.0, 2.0, 3.0]
STORED, OPEN, REFUSED, SPOOLED, LOST = range(1, 6)


def account(folder: Path) -> Verdict:
    verdict = Verdict()
    judge(folder, verdict)
    return verdict


def test_each_promised_step_is_stored_refused_or_on_disk(tmp_path: Path) -> None:
    """One in each state, and one that is nowhere. An open episode's step is in the journal: it
    counts as lost until the collector was waited for, which is why the scenario waits."""
    root = tmp_path / "root"
    names: dict[int, str] = {}
    refused: list[Refusal] = []
    declare(root, episode_timeout=HOUR / 2)

    def spooling(address: str, spool: str = "volume/spool") -> PolicyClient:
        return PolicyClient(
            address, on_full="spool", spool_dir=tmp_path / spool, on_error=refused.append
        )

    with CollectorProcess(root) as collector:
        client = spooling(collector.address)
        client.log_step(OBS, 1, float(STORED))
        names[REFUSED] = client.start_episode()
        client.log_action(names[REFUSED], OBS, 1)
        client.flush(60)
        collector.turn_clock()
        collector.await_abandoned(names[REFUSED])
        client.log_returns(names[REFUSED], float(REFUSED))
        with pytest.raises(Refusal, match="abandoned"):
            client.flush(60)
        names[OPEN] = client.start_episode()
        client.log_action(names[OPEN], OBS, 1)
        client.log_returns(names[OPEN], float(OPEN))
        client.flush(60)
        assert collector.stop() == 0
        client.log_step(OBS, 1, float(SPOOLED))
        client.close(0.01)
        (tmp_path / "notes-1").write_text(
            json.dumps({what: [float(n) for n in range(1, 6)] for what in ("sent", "acknowledged")})
        )
        (tmp_path / "episodes-1").write_text(
            "".join(f"{float(n)} {name}\n" for n, name in names.items())
        )
        (tmp_path / "refused-1").write_text(
            "".join(f"{one.code} {one.episode_id}\n" for one in refused)
        )
        early = account(tmp_path)
        collector.restart()
        collector.turn_clock()
        assert collector.empty(60)
        assert collector.stop() == 0
    settled = account(tmp_path)
    assert early.faults == {"lost": ["2, such as [2.0, 5.0]"]}
    assert settled.faults == {"lost": ["1, such as [5.0]"]}
    for name, count in {"refused": 1, "on_disk": 1, "unrewarded": 1}.items():
        assert settled.counts[name] == count
