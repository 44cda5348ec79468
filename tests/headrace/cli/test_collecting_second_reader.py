"""`headrace verify --second-reader`: its table and its JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from storage.shards.digests import digest_of
from storage.shards.shard import read_shard
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace

STEPS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one shard."""
    root = tmp_path_factory.mktemp("whole") / "root"
    declare(root)
    step = {"type": "log_action", "episode_id": "e", "obs": [0.5] * 4, "action": 1}
    events = [{"type": "start", "episode_id": "e"}, *([step] * STEPS)]
    with CollectorProcess(root) as collector:
        collector.post("/v1/events", {"events": [*events, {"type": "end", "episode_id": "e"}]})
        assert collector.stop() == 0
    return root


def test_a_sound_root_is_read_again(whole: Path) -> None:
    """With the option, document and table name the second reader and its counts; else neither
    does."""
    found = answer(headrace("verify", "--root", whole, "--second-reader", "--json"))
    reader = found["second_reader"].pop("reader")
    assert found["second_reader"] == {"shards": 1, "rows": STEPS}
    shown = headrace("verify", "--root", whole, "--second-reader")
    assert f"Read again by {reader}: shards 1, rows {STEPS}\n" in shown.stdout
    assert answer(headrace("verify", "--root", whole, "--json"))["second_reader"] is None


def test_a_shard_that_the_second_reader_reads_otherwise_is_an_exit_status(
    whole: Path, tmp_path: Path
) -> None:
    """1, with a line that names the shard; in the document as a finding of its kind."""
    root = tmp_path / "root"
    shutil.copytree(whole, root)
    (path,) = (root / "shards").glob("*/*.parquet")
    encodings = {"use_dictionary": False, "column_encoding": {"terminateds": "RLE"}}
    pq.write_table(read_shard(path), path, write_page_checksum=True, **encodings)
    digest = digest_of(path.read_bytes())
    path = path.rename(path.with_name(f"{path.name[:26]}{digest[:16]}.parquet"))
    shown = headrace("verify", "--root", root, "--second-reader")
    assert shown.returncode == 1
    assert f"differs: shards/{path.parent.name}/{path.name}: terminateds: " in shown.stdout
    result = headrace("verify", "--root", root, "--second-reader", "--json")
    kinds = {finding["kind"] for finding in json.loads(result.stdout)["findings"]}
    assert "differs" in kinds
