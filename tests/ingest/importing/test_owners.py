"""Several agents and policies in one log, with infos and final observations, as read back.

Also of `ingest.importing.episodes`.
"""

from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ingest.importing.importing import import_table, run_import
from ingest.importing.inference import infer_spaces
from ingest.importing.options import ImportOptions
from ingest.importing.report import ImportReport
from ingest.protocol.errors import ImportFailed
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Box, Dict, Discrete, Tuple
from tests.collector_process import CollectorProcess, shard_rows

MOVES = Discrete.of(["left", "right"])
POLICIES = {
    "walker": (Box((2,)), Discrete(3)),
    "flyer": (Box((1,)), MOVES),
    "hopper": (Box((1,)), Discrete(2)),
    "pair": (Tuple((Box((1,)), MOVES)), Discrete(2)),
    "named": (Dict((("at", MOVES), ("x", Box((1,))))), MOVES),
}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """One for all tests here, whose imports have distinct name prefixes."""
    root = tmp_path_factory.mktemp("root")
    for name, (observation, action) in POLICIES.items():
        declared = PolicyDeclaration(
            policy_id=name, observation=observation, action=action, seal_seconds=0.1
        )
        save_declaration(root, declared)
    with CollectorProcess(root) as running:
        yield running


def rows_of(collector: CollectorProcess, report: ImportReport) -> list[dict[str, Any]]:
    """The rows of an import, once all of its steps are in shards."""
    prefix = report.name.removeprefix("import-")[:12]
    until, pause = time.monotonic() + 120.0, threading.Event()
    while time.monotonic() < until:
        found = [row for row in shard_rows(collector.root) if row["eps_id"].startswith(prefix)]
        if len(found) >= report.steps + report.rows_known:
            return sorted(found, key=lambda row: (row["eps_id"], row["agent_id"], row["t"]))
        pause.wait(0.05)
    raise TimeoutError(f"{report.steps} steps are not sealed")


# --- several agents ----------------------------------------------------------------------------

JOINT = [  # episode, step, agent, x, y, h, move, flap, reward, done
    ("m1", 0, "w1", 0.5, 1.0, None, 2, None, 1.0, 0),
    ("m1", 0, "f1", None, None, 9.0, None, "right", 2.0, 0),
    ("m1", 1, "w1", 0.25, 1.5, None, 0, None, 3.0, 0),
    ("m2", 1, "f1", None, None, 7.0, None, "left", 4.0, 1),
    ("m1", 2, "w2", 8.0, 8.5, None, 1, None, 5.0, 1),
    ("m1", 2, "w1", 4.0, 4.5, None, 1, None, 6.0, 1),
    ("m1", 2, "f1", None, None, 5.0, None, "left", 7.0, 0),
]
COLUMNS = ("match", "step", "agent", "x", "y", "h", "move", "flap", "r", "done")
JOINTLY: dict[str, Any] = {
    "observation": {"walker": ["x", "y"], "flyer": ["h"]},
    "action": {"walker": "move", "flyer": "flap:categories"},
    "reward": "r",
    "episode": "match",
    "step": "step",
    "agent": "agent",
    "terminated": "done",
}
AGENTS = {"w1": "walker", "w2": "walker", "f1": "flyer"}


def write(path: Path, rows: list[tuple[Any, ...]], columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def test_agents_of_several_policies_are_one_episode(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """`MultiAgentReader` returns the log's episodes; a second import adds nothing."""
    path = write(tmp_path / "log.csv", JOINT)
    options = ImportOptions(source=path, policies=AGENTS, address=collector.address, **JOINTLY)
    report, again = run_import(options), run_import(options)
    assert (report.rows, report.steps, report.episodes, report.bad) == (7, 7, 4, [])
    assert (again.steps, again.rows_known, again.skipped_known) == (0, 7, 4)
    rows = rows_of(collector, report)
    prefix = rows[0]["eps_id"].removesuffix("m1")
    found = [
        (
            row["eps_id"].removeprefix(prefix),
            row["env_t"],
            row["agent_id"],
            row["t"],
            row["rewards"],
        )
        for row in rows
    ]
    assert found == [
        ("m1", 0, "f1", 0, 2.0),
        ("m1", 2, "f1", 1, 7.0),
        ("m1", 0, "w1", 0, 1.0),
        ("m1", 1, "w1", 1, 3.0),
        ("m1", 2, "w1", 2, 6.0),
        ("m1", 2, "w2", 0, 5.0),
        ("m2", 0, "f1", 0, 4.0),
    ]
    ends = {(row["agent_id"], row["ended"], row["agents"]) for row in rows if row["agents"] > 0}
    assert ends == {
        ("f1", "truncated", 3),  # no row of m1 is marked as done
        ("f1", "terminated", 1),
        ("w1", "terminated", 3),
        ("w2", "terminated", 3),
    }
    with MultiAgentReader(collector.root, policies=["walker", "flyer"], names=True) as reader:
        rows = [
            row
            for batch in reader
            for part in batch.policy_batches.values()
            for row in part.rows()
            if str(row["eps_id"]).startswith(prefix)
        ]
    assert reader.stats.waiting == 0
    seen = {row["rewards"]: (list(row["obs"]), row["actions"]) for row in rows}
    assert seen == {
        1.0: ([0.5, 1.0], 2),
        2.0: ([9.0], "right"),
        3.0: ([0.25, 1.5], 0),
        4.0: ([7.0], "left"),
        5.0: ([8.0, 8.5], 1),
        6.0: ([4.0, 4.5], 1),
        7.0: ([5.0], "left"),
    }


def test_a_column_names_the_policy_and_times_the_steps(collector: CollectorProcess) -> None:
    """Agents that act at one time share a step; a tag belongs to the episode, whoever acts
    first.
    """
    table = pa.table(
        {
            "match": ["a", "a", "a", "a"],
            "at": [30, 10, 10, 20],
            "agent": ["y", "y", "x", "x"],
            "policy": ["hopper", "hopper", "walker", "walker"],
            "see": [[1.0], [2.0], [3.0, 4.0], [5.0, 6.0]],
            "do": [0, 1, 2, 0],
            "r": [1.0, 2.0, 3.0, 4.0],
            "who": ["late", "first", "first", "late"],
        }
    )
    report = import_table(
        table,
        observation=["see"],
        action="do",
        reward="r",
        episode="match",
        time="at",
        agent="agent",
        policy="policy",
        tags={"who": "who"},
        uniform=True,
        address=collector.address,
    )
    assert (report.steps, report.bad_counts) == (4, {})
    assert set(report.understood["spaces"]["policies"]) == {"walker", "hopper"}
    rows = rows_of(collector, report)
    assert [(row["agent_id"], row["env_t"], row["policy_id"], row["rewards"]) for row in rows] == [
        ("x", 0, "walker", 3.0),
        ("x", 1, "walker", 4.0),
        ("y", 0, "hopper", 2.0),
        ("y", 2, "hopper", 1.0),
    ]
    assert {json.loads(row["tags"])["who"] for row in rows} == {"first"}
    assert np.allclose(np.exp([row["action_logp"] for row in rows]), [1 / 3, 1 / 3, 0.5, 0.5])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({1: {"step": 5}}, "column step: expected no gap or repeat"),
        ({4: {"agent": "w1"}}, "column step: expected at most one row per agent at each time"),
        ({1: {"agent": ""}}, "column agent: expected an agent"),
        ({1: {"agent": "g"}}, "column agent: expected an agent that has a policy"),
        ({0: {"done": 1}}, "row: expected an end only on the last row of its agent"),
        ({1: {"h": "high"}}, "column h: expected a number"),
        ({0: {"move": 3}}, "action: expected an integer of 0..2"),
    ],
)
def test_a_fault_of_one_agent_leaves_the_episode_out(
    change: dict[int, dict[str, Any]], reason: str, collector: CollectorProcess, tmp_path: Path
) -> None:
    """All agents of the episode are left out; other episodes stay."""
    rows = [list(row) for row in JOINT]
    for at, cells in change.items():
        for name, value in cells.items():
            rows[at][COLUMNS.index(name)] = value
    path = write(tmp_path / "log.csv", [tuple(row) for row in rows])
    options = ImportOptions(source=path, policies=AGENTS, address=collector.address, **JOINTLY)
    report = run_import(options, check=True)
    assert reason in report.bad_counts
    assert (report.steps, report.rows_left_out) == (1, 6)


def test_agents_of_one_policy_need_no_list_of_policies(collector: CollectorProcess) -> None:
    table = {"e": [1, 1], "n": [0, 0], "who": [7, 8], "x": [1.0, 2.0], "y": [0, 0], "a": [0, 1]}
    report = import_table(
        pa.table(table | {"r": [1.0, 2.0]}),
        observation=["x", "y"],
        action="a",
        reward="r",
        episode="e",
        step="n",
        agent="who",
        policy_id="walker",
        address=collector.address,
    )
    rows = rows_of(collector, report)
    assert [(row["agent_id"], row["agents"], row["env_t"]) for row in rows] == [
        ("7", 2, 0),
        ("8", 2, 0),
    ]


def test_rows_of_several_policies_need_no_agents(collector: CollectorProcess) -> None:
    """A log of two policies: each row, or episode, belongs to one."""
    table = pa.table(
        {
            "p": ["walker", "hopper", "nobody", "walker"],
            "see": [[1.0, 2.0], [3.0], [4.0], [5.0, 6.0]],
            "a": [2, 1, 0, 0],
            "r": [1.0, 2.0, 3.0, 4.0],
        }
    )
    options = {"observation": ["see"], "action": "a", "reward": "r", "policy": "p"}
    report = import_table(table, address=collector.address, **options)
    assert report.bad_counts == {"column p: expected one of hopper, walker": 1}
    rows = rows_of(collector, report)
    found = sorted((row["rewards"], row["policy_id"], row["actions"]) for row in rows)
    assert found == [(1, "walker", 2), (2, "hopper", 1), (4, "walker", 0)]
    with pytest.raises(ImportFailed, match=r"column p: expected policies of \['flyer', "):
        import_table(table.slice(2, 1), address=collector.address, **options)


@pytest.mark.parametrize("values", [[True, False, None], ["TRUE", "False", None]])
def test_a_boolean_is_a_policy_in_either_spelling(values: list[Any], tmp_path: Path) -> None:
    """Parquet has `true` where the policy's id is `True`; a default counts too."""
    for name in ("False", "True"):
        declared = PolicyDeclaration(
            policy_id=name, observation=Box((1,)), action=Discrete(2), seal_seconds=0.1
        )
        save_declaration(tmp_path, declared)
    table = pa.table({"p": values, "x": [0.0] * 3, "a": [0] * 3, "r": [1.0, 2.0, 3.0]})
    with CollectorProcess(tmp_path) as running:
        report = import_table(
            table,
            address=running.address,
            observation=["x"],
            action="a",
            reward="r",
            policy="p",
            default={"p": "True"},
        )
        assert report.bad_counts == {}
        assert running.stop() == 0
    found = sorted((row["rewards"], row["policy_id"]) for row in shard_rows(tmp_path))
    assert found == [(1, "True"), (2, "False"), (3, "True")]


def test_options_of_agents_that_make_no_sense_are_refused() -> None:
    plain = {"source": "x", "observation": ["x"], "action": "a", "reward": "r"}
    for more, text in (
        ({"agent": "w"}, "agent: expected an episode column and a step or time column"),
        ({"agent": "w", "episode": "e"}, "agent: expected an episode column and"),
        ({"policies": {"w": "p"}}, "policies: expected an agent column"),
        ({"policies": {"w": "p"}, "policy": "p"}, "expected one of policies and policy"),
        ({"observation": {"p": ["x"]}}, "observation: columns by policy need policies or policy"),
        ({"policy": "p", "schema_id": "abc"}, "schema_id: expected none with several"),
        ({"final_observation": ["x", "y"]}, "final_observation: expected 1 column"),
        ({"final_observation": "x"}, "final_observation: expected 1 column"),
    ):
        with pytest.raises(ImportFailed, match=text):
            ImportOptions(**{**plain, **more})
    options = ImportOptions(**{**plain, "policy": "p", "observation": {"a": ["x"]}})
    with pytest.raises(ImportFailed, match="expected columns for the policy 'b', got some for"):
        options.observations_of("b")


# --- infos and final observations --------------------------------------------------------------


def test_final_observations_are_those_of_the_last_rows(collector: CollectorProcess) -> None:
    """The next observation of an episode's last step is the column's value, or absent."""
    table = pa.table(
        {
            "e": ["a", "a", "b", "c"],
            "n": [0, 1, 0, 0],
            "at": ["left", "right", "left", "left"],
            "x": [1.0, 2.0, 3.0, 4.0],
            "next_at": ["right", "left", None, "right"],
            "next_x": [2.0, 9.0, None, 8.0],
            "do": ["left", "right", "left", "left"],
            "cut": [False, True, False, True],
            "r": [1.0, 2.0, 3.0, 4.0],
        }
    )
    report = import_table(
        table,
        observation=["x", "at:categories"],
        final_observation=["next_x", "next_at"],
        action="do:categories",
        reward="r",
        episode="e",
        step="n",
        truncated="cut",
        policy_id="named",
        address=collector.address,
    )
    assert (report.steps, report.bad_counts) == (4, {})
    rows_of(collector, report)
    columns = ("obs", "new_obs", "rewards", "truncateds", "eps_id")
    with ShardReader(collector.root, policy_id="named", columns=columns, names=True) as reader:
        rows = [row for batch in reader for row in batch.rows()]
    prefix = report.name.removeprefix("import-")[:12]
    found = {row["rewards"]: row for row in rows if str(row["eps_id"]).startswith(prefix)}
    assert [(found[r]["new_obs.at"], found[r]["new_obs.x"].tolist()) for r in (1.0, 2.0, 4.0)] == [
        ("right", [2.0]),
        ("left", [9.0]),
        ("right", [8.0]),
    ]
    assert [bool(found[r]["truncateds"]) for r in (1.0, 2.0, 3.0, 4.0)] == [
        False,
        True,
        False,
        True,
    ]


def test_a_tuple_takes_a_column_for_each_part(collector: CollectorProcess) -> None:
    """A Tuple space takes one column for each part, in order; a part with names takes names."""
    table = {"x": [1.0, 2.0], "to": ["right", "?"], "a": [0, 1], "r": [1.0, 2.0]}
    given = {"action": "a", "reward": "r", "policy_id": "pair", "address": collector.address}
    report = import_table(pa.table(table), observation=["x", "to:categories"], **given)
    assert report.bad_counts == {"column to: expected one of the 2 names 'left', 'right'": 1}
    (row,) = rows_of(collector, report)
    assert (row["obs__1"], row["obs__0"].tolist()) == (1, [1.0])
    with pytest.raises(ImportFailed, match=r"policy expects 2 columns, got \['x'\]"):
        import_table(pa.table(table), observation=["x"], **given)


@pytest.mark.parametrize(
    ("missing", "bad", "final"),
    [
        ("error", {"column next_y: expected numbers": 1}, []),
        ("drop", {}, []),
        ("value", {}, [7.0, 0.0]),
    ],
)
def test_a_final_observation_that_lacks_a_cell(
    missing: str, bad: dict[str, int], final: list[float], collector: CollectorProcess
) -> None:
    """The final observation is a fault, absent or filled with 0, as `missing` says; no row is
    dropped for it."""
    table = {"x": [1.0], "y": [2.0], "next_x": [7.0], "next_y": [None], "a": [0], "r": [1.0]}
    report = import_table(
        pa.table(table),
        observation=["x", "y"],
        final_observation=["next_x", "next_y"],
        action="a",
        reward="r",
        missing=missing,
        policy_id="walker",
        address=collector.address,
    )
    assert (report.bad_counts, report.rows_dropped) == (bad, 0)
    assert report.steps == (0 if bad else 1)
    if not bad:
        (row,) = rows_of(collector, report)
        given = row["final_obs"]
        assert ([] if given is None else given.tolist()) == final


def test_infos_are_json_of_their_columns(collector: CollectorProcess, tmp_path: Path) -> None:
    """Numbers, booleans, lists and structures are kept; text that reads as a number becomes one."""
    table = {
        "x": [1.0, 2.0],
        "y": [0.0, 0.0],
        "a": [0, 0],
        "r": [1.0, 2.0],
        "whole": [3, None],
        "part": [0.5, float("nan")],
        "on": [True, False],
        "word": ['say "hi"', "007"],
        "text": ["12", "1.5e3"],
        "deep": [{"k": [1, 2]}, None],
        "none": pa.nulls(2),
    }
    names = ("whole", "part", "on", "word", "text", "deep", "none")
    report = import_table(
        pa.table(table),
        observation=["x", "y"],
        action="a",
        reward="r",
        infos={name: name for name in names},
        policy_id="walker",
        address=collector.address,
    )
    assert (report.steps, report.bad_counts) == (2, {})
    found = sorted(rows_of(collector, report), key=lambda row: row["rewards"])
    assert [json.loads(row["infos"]) for row in found] == [
        {
            "whole": 3,
            "part": 0.5,
            "on": True,
            "word": 'say "hi"',
            "text": 12,
            "deep": {"k": [1, 2]},
        },
        {"on": False, "word": "007", "text": 1500.0},
    ]


def test_a_named_import_has_its_policies_from_a_column_or_an_option(
    collector: CollectorProcess,
) -> None:
    """Under a name, the rows of a policy are known however the policy was given."""
    hops = {"x": [0.1, 0.2], "a": [0, 1], "r": [1.0, 2.0]}
    more = {"x": [0.3], "a": [None], "r": [3.0], "b": ["left"], "p": ["flyer"]}
    table = pa.table(hops | {"b": [None, None], "p": ["hopper", "hopper"]})
    table = pa.concat_tables([table, pa.table(more)], promote_options="permissive")
    given = {"observation": ["x"], "reward": "r", "name": "hops", "address": collector.address}
    first = import_table(pa.table(hops), action="a", policy_id="hopper", **given)
    assert (first.steps, first.rows_known) == (2, 0)
    both = {"action": {"hopper": "a", "flyer": "b"}, "policy": "p"}
    again = import_table(table, **both, **given)
    assert (again.steps, again.rows_known, again.bad_counts) == (1, 2, {})
    assert import_table(table, **both, **given).rows_known == 3
    given["name"] = "one name, two logs"
    for policy_id, action in (("hopper", 0), ("flyer", "left")):
        log = pa.table({"x": [0.1], "a": [action], "r": [1.0]})
        alone = import_table(log, action="a", policy_id=policy_id, **given)
        assert (alone.steps, alone.bad_counts) == (1, {}), "a name is a policy's own"


def test_names_are_those_of_final_observations_too(tmp_path: Path) -> None:
    """Values that occur only in final observations count too."""
    rows = [("a", 1, "b", 2, 0, 0.0), ("b", 2, "goal", 3, 1, 1.0)]
    path = write(tmp_path / "log.csv", rows, ("s", "n", "next_s", "next_n", "a", "r"))
    given = {"source": path, "action": "a", "reward": "r"}
    named = ImportOptions(observation=["s:categories"], final_observation=["next_s"], **given)
    assert infer_spaces(named)[0] == Discrete.of(["a", "b", "goal"])
