"""An export, imported again, is the log: rows, ends, and observations as far as they are known.

The command is `headrace.cli.exporting`. The formats' own libraries load exports in environments of
their own: `make exports`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tensordict import TensorDict

from ingest.importing.importing import import_table
from ingest.importing.inference import infer_spaces
from ingest.importing.options import ImportOptions
from policy.exporting import episodes, hdf5, lerobot, tables, torchrl
from policy.exporting.opening import FORMATS, export
from policy.exporting.runs import ExportFailed
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import NothingYet
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import SampleBatch
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import headrace
from tests.policy.exporting.written_log import (
    CHOICES,
    SPACES,
    VECTORS,
    Expected,
    selection,
    write_log,
)

TABLE = {
    "observation": ["obs"],
    "final_observation": ["new_obs"],
    "action": ["actions"],
    "reward": "rewards",
    "episode": "eps_id",
    "terminated": "terminateds",
    "truncated": "truncateds",
    "action_logp": "action_logp",
}
IMPORTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "d3rlpy": (CHOICES, "dataset.h5", {"format": "d3rlpy"}),
    "huggingface": (CHOICES, "data/train-00000-of-00001.parquet", TABLE),
    "jsonl": (CHOICES, "steps.jsonl", TABLE),
    "lerobot": (VECTORS, "", {"format": "lerobot"}),
    "minari": (VECTORS, "data", {"format": "minari", "action_logp": "infos.action_logp"}),
    "rllib-episodes": (VECTORS, "episodes.parquet", {"format": "rllib-episodes"}),
}
"""Format -> the policy that is exported, the file to import, and how."""
NEEDS_NEXT = ("minari", "rllib", "rllib-episodes", "torchrl")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Expected]]]:
    """(a folder with a root for each policy, the runs of each)."""
    folder = tmp_path_factory.mktemp("log")
    return folder, {name: write_log(folder / name, name) for name in SPACES}


def kept(to: str, runs: list[Expected]) -> list[Expected]:
    if to not in NEEDS_NEXT:
        return runs
    return [one for one in map(Expected.with_next, runs) if one is not None]


@pytest.fixture(scope="module")
def imported(log: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Format -> the rows of each episode, written in blocks and imported into one collector."""
    folder, root = tmp_path_factory.mktemp("exports"), tmp_path_factory.mktemp("root")
    given = {}
    for to, (policy_id, file, options) in IMPORTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("policy.exporting.runs.ROWS", 7)
            export(selection(log[0] / policy_id, policy_id), to, folder / to)
        given[to] = {"source": folder / to / file, **options}
        observation, action = infer_spaces(ImportOptions(**given[to]))
        declared = PolicyDeclaration(observation=observation, action=action, policy_id=to)
        save_declaration(root, declared)
    with CollectorProcess(root) as collector:
        for to, options in given.items():
            report = import_table(**options, policy_id=to, address=collector.address)
            assert report.rows_left_out == 0, (to, report.bad)
        assert collector.stop() == 0
    found: dict[str, dict[str, list[Any]]] = {to: {} for to in given}
    for row in sorted(shard_rows(root), key=lambda row: row["t"]):
        found[row["policy_id"]].setdefault(row["eps_id"], []).append(row)
    return {to: list(episodes.values()) for to, episodes in found.items()}


@pytest.mark.parametrize("to", IMPORTS)
def test_an_export_that_is_imported_is_the_log(to: str, log: Any, imported: Any) -> None:
    """What was open or cut off is truncated, as is the piece before a gap."""
    policy_id = IMPORTS[to][0]
    expected = kept(to, log[1][policy_id])
    by_reward = {float(np.float32(rows[0]["rewards"])): rows for rows in imported[to]}
    assert len(by_reward) == len(expected)
    for one in expected:
        rows = by_reward[float(np.float32(one.rewards[0]))]
        assert [row["rewards"] for row in rows] == pytest.approx(one.rewards, rel=1e-6)
        assert rows[-1]["ended"] == ("terminated" if one.terminated else "truncated"), one.name
        assert np.stack([row["actions"] for row in rows]) == pytest.approx(one.actions)
        at = 0 if policy_id == CHOICES else 1  # numbers are imported as one array, `load` first
        assert np.stack([row["obs"] for row in rows])[:, at:] == pytest.approx(one.obs[:-1])
        logp = [row["action_logp"] for row in rows]
        if to in ("d3rlpy", "lerobot"):
            assert np.isnan(logp).all()
        else:
            assert logp == pytest.approx(one.logp)
        if to == "huggingface" or to in NEEDS_NEXT:
            final = rows[-1]["final_obs"]
            unknown = np.isnan(one.obs[-1]).any()
            assert unknown == (final is None)
            assert unknown or np.frombuffer(final, "<f4")[at:] == pytest.approx(one.obs[-1])


def test_the_note_has_the_ordinals_and_the_counts(log: Any, tmp_path: Path) -> None:
    """Of the rows that were read; the part of a gap is one of them."""
    folder, runs = log
    report = export(selection(folder / CHOICES), "rllib", tmp_path / "new" / "out")
    steps = sum(len(one.rewards) for one in kept("rllib", runs[CHOICES]))
    every = sum(len(one.rewards) for one in runs[CHOICES])
    assert (report.rows, report.left_out) == (steps, every - steps)
    note = json.loads((tmp_path / "new" / "out" / "headrace.json").read_text())
    assert note["policy_id"] == CHOICES
    assert note["rows"] == steps
    (ranges,) = note["lineage"].values()
    assert len(RangeSet.from_json(ranges)) == 7  # `open` and `gap` have two parts
    with pytest.raises(FileExistsError, match="new folder"):
        export(selection(folder / CHOICES), "rllib", tmp_path / "new" / "out")


def test_rllibs_table_has_what_its_learners_need(log: Any, tmp_path: Path) -> None:
    folder, runs = log
    export(selection(folder / CHOICES), "rllib", tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "steps.parquet")
    assert table.column_names == [
        *("eps_id", "obs", "actions", "rewards", "new_obs", "terminateds", "truncateds")
    ]
    found: dict[str, list[Any]] = {}
    for row in table.to_pylist():
        found.setdefault(row["eps_id"], []).append(row)
    expected = kept("rllib", runs[CHOICES])
    assert {*found} == {one.name for one in expected}
    for one in expected:
        rows = found[one.name]
        assert np.array([row["new_obs"] for row in rows]) == pytest.approx(one.obs[1:])
        assert [row["terminateds"] for row in rows] == [*[False] * (len(rows) - 1), one.terminated]
        assert rows[-1]["truncateds"] is not one.terminated


def test_torchrls_rows(log: Any, tmp_path: Path) -> None:
    folder, runs = log
    export(selection(folder / CHOICES), "torchrl", tmp_path / "out")
    rows = TensorDict.load_memmap(tmp_path / "out" / "steps")
    expected = kept("torchrl", runs[CHOICES])
    assert len(rows) == sum(len(one.rewards) for one in expected)
    ends = [int(end) for end in rows["next", "done"].flatten().nonzero()]
    assert len(ends) == len(expected)
    assert rows["next", "terminated"].sum() == sum(one.terminated for one in expected)
    assert {float(value) for value in rows["action_log_prob"]} == {
        float(value) for one in expected for value in one.logp
    }
    assert len({(int(o), int(t)) for o, t in zip(rows["ordinal"], rows["t"], strict=True)}) == len(
        rows
    )


def test_what_a_format_cannot_hold_is_named(log: Any, tmp_path: Path) -> None:
    folder, out = log[0], tmp_path / "out"
    with pytest.raises(ExportFailed, match=r"to: expected one of d3rlpy, .* got 'csv'"):
        export(selection(folder / CHOICES), "csv", out)
    with pytest.raises(
        ExportFailed, match=r"rllib: expected an observation of one array, got .* 2"
    ):
        export(selection(folder / VECTORS, VECTORS), "rllib", out)
    with pytest.raises(NothingYet, match=r"expected .*steps of policy 'other'.*, got none"):
        export(selection(folder / CHOICES, "other"), "jsonl", out)
    assert not [*tmp_path.glob(".out*")]
    assert not out.exists()


@pytest.mark.parametrize("to", NEEDS_NEXT)
def test_a_log_without_a_row_for_the_format_is_named(to: str, tmp_path: Path) -> None:
    write_log(tmp_path, kinds={"lost": 1})
    with pytest.raises(NothingYet, match=rf"expected steps of policy '{CHOICES}' that {to} can"):
        export(selection(tmp_path), to, tmp_path / "out")


def test_the_command_says_what_it_left_out(log: Any, tmp_path: Path) -> None:
    folder, runs = log
    options = ("--root", folder / CHOICES, "--policy-id", CHOICES, "-o", tmp_path / "out")
    done = headrace("export", "--to", "minari", *options)
    steps = sum(len(one.rewards) for one in kept("minari", runs[CHOICES]))
    assert f"{steps} steps of {len(kept('minari', runs[CHOICES]))} episodes" in done.stdout
    assert "left out: 3 last steps without a next observation, which minari needs" in done.stdout


def test_every_format_is_tested() -> None:
    assert {*FORMATS} == {*IMPORTS, "rllib", "torchrl"}
    for module in (episodes, hdf5, lerobot, tables, torchrl):
        assert module.__name__.rpartition(".")[2] in FORMATS.values()


def test_deviations_are_exact_far_from_zero() -> None:
    """Of all blocks of rows together."""
    values = 1.7e9 + np.random.default_rng(0).normal(size=(300, 2))
    found = lerobot._Statistics()
    for block in np.split(values, [100, 150]):
        found.add(SampleBatch({"obs": block}))
    stats = found.to_json()["obs"]
    np.testing.assert_allclose(stats["mean"], values.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats["std"], values.std(axis=0), rtol=1e-6)
