"""A token that is revoked while its import is processed."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from pathlib import Path

import pyarrow as pa

from ingest.access.key_files import create_token, revoke_token
from ingest.protocol import messages as wire
from tests.collector_process import CollectorProcess, declare
from tests.faults.power_loss import wait_until

EPISODES, MAX_PENDING = 4_000, 300_000


def body() -> bytes:
    columns = {
        "eps_id": [f"one-{number}" for number in range(EPISODES)],
        "obs": pa.array([[0.0] * 4] * EPISODES, pa.list_(pa.float32(), 4)),
        "actions": pa.array([1] * EPISODES, pa.int64()),
        "rewards": pa.array([1.0] * EPISODES, pa.float64()),
    }
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def test_a_revoked_tokens_import_goes_no_further(tmp_path: Path) -> None:
    """The import gets 401 before its next group of rows; the rows accepted until then stay, and are
    whole.

    The shard writer is stopped, so that the import waits for it half-way.
    """
    declare(tmp_path, seal_seconds=0.2)
    made, text = create_token(tmp_path, "import", ["log"])
    own = {"authorization": f"Bearer {text}"}
    other = {"authorization": "Bearer " + create_token(tmp_path, "other", ["log"])[1]}
    data, answers = body(), []
    with CollectorProcess(tmp_path, options=["--limit", f"max_pending={MAX_PENDING}"]) as collector:
        sent = {**own, "content-type": wire.ARROW, "headrace-crc32": f"{zlib.crc32(data):08x}"}

        def post() -> None:
            answers.append(collector.request("POST", "/v1/steps", data, sent))

        def waiting() -> bool:
            ready = collector.request("GET", "/readyz", None, other)[1]
            return bool(ready["bytes_waiting"] >= MAX_PENDING)

        writer = collector.started_writer()
        os.kill(writer, signal.SIGSTOP)
        thread = threading.Thread(target=post)
        thread.start()
        try:
            assert wait_until(waiting)
            revoke_token(tmp_path, made.id)
            assert wait_until(lambda: collector.request("GET", "/v1/spec", None, own)[0] == 401)
            assert answers == []
        finally:
            os.kill(writer, signal.SIGCONT)
            thread.join()
        [(status, reply)] = answers
        assert (status, reply["error"]["code"]) == (401, "unauthorized")
        state = collector.request("GET", "/readyz", None, other)[1]
        assert 0 < state["steps"] < EPISODES
        collector.settle(state["steps"], **other)
        assert collector.stop() == 0
