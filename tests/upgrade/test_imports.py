"""Imports into a root of an earlier release: repeated, they add nothing; halves are completed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collector_process import CollectorProcess
from tests.headrace.command import answer, headrace
from tests.upgrade.fixture import BUILDS, steps_in_shards, unpacked, verified


@pytest.mark.parametrize("build", BUILDS)
def test_repeated_imports_add_what_is_missing(tmp_path: Path, build: str) -> None:
    """Each source is whole afterwards, each row once; with and without `--name`."""
    facts, root = unpacked(tmp_path, "imports", build), tmp_path / "root"
    assert verified(root) == facts["acknowledged"]
    keyed = facts["keyed"]
    with CollectorProcess(root, options=facts["options"]) as collector:
        for again in range(2):
            for source, one in facts["imports"].items():
                report = answer(
                    headrace(
                        *("import", tmp_path / "sources" / source, *one["words"], "--json"),
                        *("--policy-id", "default", "--address", collector.address),
                    )
                )
                new = 0 if again else one["rows"] - one["stored"]
                assert (report["steps"], report["rows_known"]) == (new, one["rows"] - new), source
            body = (tmp_path / "keyed.arrow").read_bytes()
            reply = collector.post("/v1/steps", body, **keyed["headers"])[1]
            assert (reply["accepted"], reply["duplicates"]) == (0, keyed["accepted"])
        assert collector.stop() == 0
    rows = sum(one["rows"] for one in facts["imports"].values()) + keyed["rows"]
    assert verified(root) == rows
    found = steps_in_shards(root)
    assert set(found.values()) == {1}
    assert found.total() == rows
