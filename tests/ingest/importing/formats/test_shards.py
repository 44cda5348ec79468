"""Shards that are imported into another root keep what they say about each step."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ingest.importing.importing import import_table
from ingest.importing.inference import infer_spaces
from ingest.importing.options import ImportOptions
from ingest.protocol.errors import ImportFailed
from ingest.protocol.messages import ARROW
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Box, Discrete, Space
from tests.collector_process import CollectorProcess, shard_rows

KEPT = ["t", "actions", "rewards", "action_logp", "policy_version", "pass_prob", "ts", "infos"]
KEPT += ["tags", "training_enabled", "ended", "truncateds", "final_obs"]


def posted() -> bytes:
    """Episodes as the bulk route takes them: one continues another, one is not trained on."""
    lengths = {"first": 3, "second": 2, "apart": 2}
    table = pa.table(
        {
            "eps_id": [name for name, steps in lengths.items() for _ in range(steps)],
            "obs": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(14, dtype="f4")), 2),
            "actions": [0, 1, 0, 1, 1, 0, 1],
            "rewards": [0.5, -1.0, 0.0, 2.0, 0.0, 0.25, 1.0],
            "action_logp": [-0.5, None, -0.25, None, -1.0, -0.125, -2.0],
            "policy_version": [3, 3, 4, 4, -1, 0, 5],
            "pass_prob": [1.0, 1.0, 1.0, 0.25, 0.25, 0.5, 0.5],
            "ts": [1_700_000_000_000_000 + n for n in range(7)],
            "infos": ['{"zip":"05"}', None, '{"n":[1,2.5]}', None, None, '{"x":null}', None],
            "tags": ['{"k":"1"}', None, None, None, None, '{"a":"b"}', None],
            "continues": [None, None, None, "first", None, None, None],
            "training_enabled": [True, True, True, True, True, False, False],
            "truncateds": [False, False, True, False, False, False, True],
            "final_obs": pa.FixedSizeListArray.from_arrays(
                pa.array(np.arange(14, dtype="f4") + 50),
                2,
                mask=pa.array([True, True, False, True, True, True, True]),
            ),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def sealed(root: Path, spaces: tuple[Space, Space], fill: Any) -> list[dict[str, Any]]:
    """The rows of a root after `fill(collector)`, by episode and step."""
    observation, action = spaces
    save_declaration(root, PolicyDeclaration(observation=observation, action=action))
    with CollectorProcess(root) as collector:
        fill(collector)
        assert collector.stop() == 0
    return sorted(shard_rows(root), key=lambda row: (row["ts"], row["t"]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("source") / "root"

    body = posted()

    def fill(collector: CollectorProcess) -> None:
        headers = {"content-type": ARROW, "headrace-crc32": f"{zlib.crc32(body):08x}"}
        status, answer = collector.request("POST", "/v1/steps", body, headers)
        assert (status, answer.get("accepted")) == (200, 13), answer

    return root, sealed(root, (Box((2,)), Discrete.of(["left", "right"])), fill)


def test_steps_and_episodes_are_kept(source: Any, tmp_path: Path) -> None:
    """Versions, sampling, unknown propensities, infos, tags, endings, and what continues what."""
    root, rows = source
    spaces = infer_spaces(ImportOptions(source=root, format="headrace"))
    assert spaces == (Box((2,)), Discrete.of(["left", "right"]))
    other = (spaces[0], Discrete.of(["right", "left"]))  # its codes are others

    def fill(collector: CollectorProcess) -> None:
        given = {"format": "headrace", "address": collector.address}
        report = import_table(root, **given)
        assert (report.steps, report.rows_left_out, report.bad) == (7, 0, [])
        again = import_table(root, **given)
        assert (again.steps, again.rows_known) == (0, 7)

    made = sealed(tmp_path / "root", other, fill)
    assert [row["actions"] for row in made] == [1 - row["actions"] for row in rows]
    for old, new in zip(rows, made, strict=True):
        assert np.array_equal(old["obs"], new["obs"])
        for name in KEPT:
            if name != "actions":
                one, two = old[name], new[name]
                assert np.array_equal(one, two) or (one != one and two != two), name
    ids = {row["eps_id"].rpartition("-")[2]: row["eps_id"] for row in made}
    continued = {row["continues"] for row in made if row["eps_id"] == ids["second"]}
    assert continued == {ids["first"]}


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="expected shards"):
        infer_spaces(ImportOptions(source=tmp_path, format="headrace"))
