"""A trainer's report, in the collector's metrics and on its status page."""

from __future__ import annotations

import threading
from pathlib import Path

import urllib3

from ingest.collector.trainer_watch import TrainerWatch
from storage.weights.lease import Lease
from storage.weights.off_chain import mark_off_chain
from tests.collector_process import CollectorProcess, declare
from tests.storage.weights.any_weights import add, store_in

STATUS = {"rows_trained": 300, "excluded": {"damaged": 60, "stale": 7}, "excluded_shards": 1}


def weights_in(root: Path) -> Path:
    """Three versions, of which the second has lost its checkpoint, and a lease that was held."""
    store = store_in(root)
    for value in (1.0, 2.0, 3.0):
        store.publish(add(store, value))
    mark_off_chain(store.files, 2, "its checkpoint is lost")
    lease = Lease.take(store.files)
    lease.report(STATUS)
    lease.release()
    return store.directory


def test_what_a_trainer_said_last_is_known_and_which_versions_it_gave_up(tmp_path: Path) -> None:
    """A trainer's last report and its left-out rows are known after its lease has ended. Neither a
    damaged record nor a later release's decision stops that."""
    folder = weights_in(tmp_path)
    decision = tmp_path / "decisions" / "default" / "1-later.json"
    decision.parent.mkdir(parents=True)
    decision.write_text('{"format": 99}')
    watch = TrainerWatch(tmp_path, ["default", "other"])
    watch.look()
    alive, status = watch.status()["default"]
    assert (alive, status) == watch.status_of("default") == (False, STATUS)
    assert watch.status_of("other") == (None, {})
    assert watch.off_chain()["default"] == [2]
    for path in (folder / "leases").iterdir():
        path.write_bytes(b"{")
    watch.look()
    assert watch.status()["default"][1] == STATUS


def test_metrics_and_page_name_what_is_left_out(tmp_path: Path) -> None:
    """Rows by reason, the waiting time of clients, and versions off the chain."""
    declare(tmp_path, steps_per_version=4)
    weights_in(tmp_path)
    pause = threading.Event()
    with CollectorProcess(tmp_path) as process:

        def text_of(path: str) -> str:
            return urllib3.request("GET", process.address + path).data.decode()

        while "damaged" not in (text := text_of("/metrics")):
            pause.wait(0.05)
        assert 'headrace_training_excluded_rows{policy="default",reason="damaged"} 60.0' in text
        assert 'headrace_training_excluded_rows{policy="default",reason="stale"} 7.0' in text
        assert 'headrace_training_stalled_seconds{policy="default"} 0.0' in text
        assert 'headrace_trainer_up{policy="default"} 0.0' in text
        assert "off the chain: versions 2" in text_of("/")
