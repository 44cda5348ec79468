"""The files of other programs: what is imported is what these programs read of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.importing.engine import Workspace
from ingest.importing.formats import hdf5, lerobot, obd, rllib_batches, rllib_episodes, shards, vw
from ingest.importing.formats.opening import FORMATS
from ingest.importing.formats.recipes import arrow_column
from ingest.importing.importing import import_table
from ingest.importing.inference import infer_policy, infer_spaces
from ingest.importing.options import ImportOptions
from ingest.importing.report import ImportReport
from ingest.protocol.errors import ImportFailed
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary
from tests.collector_process import CollectorProcess, shard_rows
from tests.fixtures.formats.write import ENDS, episodes

FILES = Path(__file__).parents[3] / "fixtures" / "formats"
SOURCES = {
    "d3rlpy": ("d3rlpy.h5", {}),
    "d4rl": ("d4rl.hdf5", {}),
    "lerobot_v2": ("lerobot_v2", {}),
    "lerobot_v3": ("lerobot_v3", {}),
    "minari": ("minari/toy-v0", {"action_logp": "infos.logp"}),
    "rllib": ("rllib", {}),
    "rllib_episodes": ("rllib_episodes", {}),
    "vw": ("vw.dsjson", {}),
    "obd": ("obd/random/all", {}),
}
"""Policy of its own -> file, and the options beyond the format."""


def format_of(name: str) -> str:
    return {"vw": "dsjson", "rllib_episodes": "rllib-episodes"}.get(name, name.partition("_v")[0])


def expected(name: str) -> Any:
    return json.loads((FILES / "expected" / f"{name.partition('_v')[0]}.json").read_text())


Imported = tuple[dict[str, ImportReport], dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """(reports, rows) by name: all files are imported into one collector, twice."""
    root = tmp_path_factory.mktemp("formats") / "root"
    given = {
        name: {"source": FILES / file, "format": format_of(name), **more}
        for name, (file, more) in SOURCES.items()
    }
    for name, options in given.items():
        observation, action = infer_spaces(ImportOptions(**options))
        declared = PolicyDeclaration(observation=observation, action=action, policy_id=name)
        save_declaration(root, declared)
    with CollectorProcess(root) as collector:
        target = {"address": collector.address}
        reports = {n: import_table(**one, policy_id=n, **target) for n, one in given.items()}
        again = [import_table(**one, policy_id=n, **target) for n, one in given.items()]
        assert collector.stop() == 0
    assert [one.steps for one in again] == [0] * len(SOURCES)
    assert [one.rows_known for one in again] == [one.steps for one in reports.values()]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SOURCES}
    for row in shard_rows(root):
        rows[row["policy_id"]].append(row)
    return reports, rows


def by_episode(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each episode, in the order of `ENDS`, whose lengths all differ."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["t"]):
        found.setdefault(row["eps_id"], []).append(row)
    return sorted(found.values(), key=len, reverse=True)


EPISODIC = [name for name in SOURCES if name not in ("vw", "obd")]


@pytest.mark.parametrize("name", EPISODIC)
def test_episodes_are_those_that_the_program_reads(name: str, imported: Imported) -> None:
    """Rewards, endings and propensities, and as many episodes."""
    reports, rows = imported
    assert reports[name].rows_left_out == 0
    found = by_episode(rows[name])
    assert [len(one) for one in found] == [steps for steps, _ in ENDS]
    for steps, right in zip(found, expected(name), strict=True):
        assert [row["rewards"] for row in steps] == pytest.approx(right["rewards"])
        assert steps[-1]["ended"] == right["ended"]
        logp = [row["action_logp"] for row in steps]
        if "logp" in right:
            assert logp == pytest.approx(right["logp"])
        else:
            assert np.isnan(logp).all()


@pytest.mark.parametrize("name", EPISODIC)
def test_values_are_those_that_were_written(name: str, imported: Imported) -> None:
    """Observations, actions, and the final observation where the format has one."""
    choices = name in ("minari", "rllib", "d3rlpy")
    found = by_episode(imported[1][name])
    for rows, (obs, actions, *_) in zip(found, episodes(choices=choices), strict=True):
        assert np.stack([row["obs"] for row in rows]) == pytest.approx(obs[:-1])
        acted = np.stack([row["actions"] for row in rows])
        assert acted == pytest.approx(actions)
        final = rows[-1]["final_obs"]
        if name.startswith(("lerobot", "d3rlpy")):
            assert final is None
        else:
            assert final == pytest.approx(obs[-1])


def test_vw_learns_from_the_same_decisions(imported: Imported) -> None:
    """Costs, actions from 0, propensities and weights as VW parses them. What it leaves out, and
    what it cannot join, is counted."""
    reports, rows = imported
    own = sorted(rows["vw"], key=lambda row: row["ts"])
    right = expected("vw")
    late = [4.0 if json.loads(row["tags"])["event_id"] == "event-2" else 0.0 for row in own]
    assert [row["rewards"] - more for row, more in zip(own, late, strict=True)] == [
        -one["cost"] for one in right
    ]
    assert sum(late) == 4.0
    assert [row["actions"] + 1 for row in own] == [one["action"] for one in right]
    assert [row["action_logp"] for row in own] == pytest.approx([one["logp"] for one in right])
    assert [1 / row["pass_prob"] for row in own] == [one["weight"] for one in right]
    lines = [json.loads(line) for line in (FILES / "vw.dsjson").read_text().splitlines()]
    hours = [one["c"]["User"].get("hour", 0) for one in lines if "c" in one]
    del hours[4]  # has _skipLearn
    assert [row["obs__User_hour"][0] for row in own] == hours
    assert reports["vw"].notes == [
        "1 decision has _skipLearn and is left out",
        "1 observation has no such decision and is left out",
    ]


def test_open_bandit_rows_are_those_of_obp(imported: Imported) -> None:
    """The item, its position (which obp ranks from 0), the click and the propensity."""
    rows = sorted(imported[1]["obd"], key=lambda row: row["ts"])
    for row, right in zip(rows, expected("obd"), strict=True):
        assert (row["actions"], row["rewards"]) == (right["action"], right["reward"])
        assert row["obs__position"] == right["position"]
        assert math.exp(row["action_logp"]) == pytest.approx(right["pscore"])
    assert row["ts"] == 1_574_553_629_140_602


# --- other files of these formats ----------------------------------------------------------------


def checked(source: Path, format: str, **more: Any) -> ImportReport:
    nobody = {"address": "http://127.0.0.1:1", "timeout": 0.01}
    return import_table(source, format=format, check=True, **nobody, **more)


def test_the_files_of_vw(tmp_path: Path) -> None:
    """Without features of candidates their number is the action space; with them they are the leaf
    `candidates`, a column for each text."""
    report = checked(FILES / "cb_features_w_zero_vals.dsjson", "dsjson")
    assert (report.steps, report.understood["rewards"]["mean"]) == (1, 1.0)
    for name in ("dsjson", "cb_json"):
        log = FILES / "cb_simple_pdrop.json"
        assert checked(log, name).understood["propensities"]["mean"] == 0.5
        declared = infer_policy(ImportOptions(source=log, format=name))
        assert declared.candidate_features == ("action.f=*", "action.f=1", "action.f=2")
        assert declared.action == Discrete(2)
    flat = tmp_path / "cb.json"
    flat.write_text('{"age": 3, "_label_Cost": 2, "_label_Probability": 0.5, "_label_Action": 2}\n')
    report = checked(flat, "cb_json")
    assert report.understood["rewards"]["mean"] == -2
    assert report.understood["spaces"]["action"] == {"kind": "discrete", "n": 1, "start": 1}
    flat.write_text('{"words": ["a"], "_label_cost": 2, "_label_Action": 2}\n')
    with pytest.raises(ImportFailed, match=r"^words: expected numbers, a text or objects"):
        checked(flat, "cb_json")


def personalizer(path: Path, count: int, *items: dict[str, Any]) -> Path:
    """The log of events with Personalizer's structure: the first candidates, of which the last is
    chosen; a reward comes later, and half of the lines were dropped."""
    lines: list[dict[str, Any]] = []
    parts = [{"new": None}, {"new": True}]
    for at in range(count):
        among = items[: 2 + at % (len(items) - 1)]
        lines.append(
            {
                "_label_cost": 0,
                "_label_probability": 0.5,
                "_labelIndex": len(among) - 1,
                "EventId": f"{path.stem}-{at}",
                "c": {"FromUrl": [{"hour": at}, {"device": "phone" if at % 2 else "desk"}]}
                | {"_multi": [{"_tag": one["id"], "i": one, "j": parts} for one in among]},
                "pdrop": 0.5,
            }
        )
    lines.append({"EventId": f"{path.stem}-1", "RewardValue": 3.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_log_of_personalizer_with_candidates(tmp_path: Path) -> None:
    """Each candidate is a row of its numbers and texts, with a mask of how many there are. A later
    log is read by the declared columns: a text without one belongs to `=*`, and a feature without
    one is refused by name."""
    items = [{"id": "a", "price": 0.5}, {"id": "b"}, {"id": "c", "price": 2}]
    first = personalizer(tmp_path / "first.dsjson", 6, *items)
    declared = infer_policy(ImportOptions(source=first, format="dsjson"))
    columns = ("i.id=*", "i.id=a", "i.id=b", "i.id=c", "i.price", "j.new")
    assert declared.candidate_features == columns
    assert declared.observation == Dict(
        {
            "FromUrl_device": Discrete.of(["desk", "phone"]),
            "FromUrl_hour": Box(()),
            "action_mask": MultiBinary((3,)),
            "candidates": Box((3, 6), ragged=True),
        }
    )
    root = tmp_path / "root"
    save_declaration(root, replace(declared, seal_seconds=0.1))
    later = personalizer(tmp_path / "later.dsjson", 2, {"id": "c"}, {"id": "new"})
    odd = personalizer(tmp_path / "odd.dsjson", 1, {"id": "a", "size": 1}, {"id": "b"})
    many = personalizer(tmp_path / "many.dsjson", 3, *items, {"id": "d"})
    texts = tmp_path / "texts.dsjson"
    label = {"_label_cost": 0, "_label_probability": 0.5, "_labelIndex": 0}
    context = {"FromUrl": {"hour": 1, "device": "desk"}}
    multi = [[{"i": {"id": f"{at}-{n}"}} for n in range(2)] for at in range(550)]
    lines = [json.dumps({**label, "c": {**context, "_multi": one}}) + "\n" for one in multi]
    texts.write_text("".join(lines))
    with CollectorProcess(root) as collector:
        for log in (first, later):
            assert import_table(log, format="dsjson", address=collector.address).rows_left_out == 0
        assert import_table(texts, format="dsjson", address=collector.address).steps == 550
        collector.settle(558)
        with pytest.raises(ImportFailed, match=r"candidate_features .*got 'i\.size'"):
            import_table(odd, format="dsjson", address=collector.address)
        with pytest.raises(ImportFailed, match="row 3: _multi: expected at most 3 candidates"):
            import_table(many, format="dsjson", address=collector.address)
    stored = shard_rows(root)
    rows = {json.loads(row["tags"])["event_id"]: row for row in stored if "event_id" in row["tags"]}
    for at in range(6):
        row, count = rows[f"first-{at}"], 2 + at % 2
        assert (row["actions"], row["rewards"]) == (count - 1, 3.0 * (at == 1))
        assert (math.exp(row["action_logp"]), row["pass_prob"]) == (0.5, 0.5)
        assert row["obs__action_mask"].tolist() == [1] * count + [0] * (3 - count)
        seen = row["obs__candidates"].reshape(count, 6)
        expected = [[0, 1, 0, 0, 0.5, 1], [0, 0, 1, 0, 0, 1], [0, 0, 0, 1, 2, 1]]
        assert seen.tolist() == expected[:count]
        assert json.loads(row["infos"])["rank"]["item"] == "abc"[count - 1]
    seen = rows["later-0"]["obs__candidates"].reshape(2, 6)
    assert seen.tolist() == [[0, 0, 0, 1, 0, 1], [1, 0, 0, 0, 0, 1]]


def decisions(tmp_path: Path, *contexts: dict[str, Any]) -> ImportReport:
    """The check of decisions with these contexts, which all cost 4."""
    file = tmp_path / "own.dsjson"
    label = {"_label_cost": 4, "_label_probability": 0.5, "_labelIndex": 0}
    file.write_text("".join(json.dumps({**label, "c": one}) + "\n" for one in contexts))
    return checked(file, "dsjson")


def test_features_of_candidates_are_columns_or_refused(tmp_path: Path) -> None:
    """None is left out silently: not one of two types in a line, nor a list, nor one of two."""
    log = tmp_path / "own.dsjson"
    label = {"_label_cost": 4, "_label_probability": 0.5, "_labelIndex": 0}

    def features(*items: Any) -> tuple[str, ...]:
        log.write_text(json.dumps({**label, "c": {"_multi": items}}) + "\n")
        return infer_policy(ImportOptions(source=log, format="dsjson")).candidate_features

    assert features({"a": "x", "b": True, "c": {}}, {"a": 2, "b": 3}) == ("a=*", "a=2", "a=x", "b")
    for item, text in (
        ({"v": [0.1, 0.2]}, r"_multi\.\[\*\]\.v: expected objects of numbers and texts, got"),
        (3, "^_multi: expected objects of numbers and texts, got numbers"),
        ({"i": [1, "x"]}, "expected numbers, a text or objects, got a list of others"),
        ({"i": [{"x": "a"}, {"x": "b"}]}, r"i\.\[\*\]\.x: expected one value .*, got \[a, b\]"),
        ({"a.b": 1, "a": {"b": 2}}, r"expected one feature a\.b, got two"),
    ):
        with pytest.raises(ImportFailed, match=text):
            features(item, item)


def test_a_skipped_decision_needs_no_candidates(tmp_path: Path) -> None:
    """A key of a context may have a dot, a name of a space may not."""
    log = tmp_path / "own.dsjson"
    label = {"_label_cost": 4, "_label_probability": 0.5, "_labelIndex": 0}
    first = {**label, "c": {"x.y": 1, "_multi": [{"a": 1}, {"a": 2}]}}
    lines = (first, {**label, "_skipLearn": True, "c": {"x.y": 2}})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = checked(log, "dsjson")
    assert report.steps == 1
    assert "x_y" in report.understood["format"]["observation"]
    assert infer_policy(ImportOptions(source=log, format="dsjson")).action == Discrete(2)


def test_many_texts_of_candidates_fit_in_memory(tmp_path: Path) -> None:
    """The rows of a log are wide only when they are read, some at a time."""
    log = tmp_path / "own.dsjson"
    label = {"_label_cost": 4, "_label_probability": 0.5, "_labelIndex": 0}
    multi = ([{"id": f"{at % 450}"}, {"id": f"{at % 450 + 450}"}] for at in range(1200))
    log.write_text("".join(json.dumps({**label, "c": {"_multi": one}}) + "\n" for one in multi))
    with Workspace() as space:
        recipe = vw.dsjson(log, ImportOptions(source=log, format="dsjson"), space)
        blocks = [block for unit in recipe.units for block in unit.blocks(["candidates"])]
    names = np.array(recipe.options["candidate_features"])
    seen = np.concatenate([block.table["candidates"].to_pylist() for block in blocks])
    rows, columns = np.nonzero(seen.reshape(2400, 901))
    assert rows.tolist() == [*range(2400)]
    assert names[columns].tolist() == [f"id={at // 2 % 450 + at % 2 * 450}" for at in range(2400)]


def test_features_with_the_names_of_a_decisions_own_columns(tmp_path: Path) -> None:
    """The cost of an item is an observation, and the label's cost is not."""
    report = decisions(tmp_path, {"cost": 7, "Action": 1}, {"cost": 9, "Action": 2})
    assert report.understood["format"]["observation"] == ["c_cost", "c_Action"]
    with pytest.raises(ImportFailed, match=r"c\.a: expected one feature a, got two"):
        decisions(tmp_path, {"A": 1, "a": 2})


def test_an_absent_text_has_a_name(tmp_path: Path) -> None:
    """And so has an empty one, which is no name of a space. An empty object is no feature."""
    report = decisions(tmp_path, {"s": "a"}, {"s": "", "inner": {}}, {})
    assert report.steps == 3
    assert report.understood["spaces"]["observation"]["names"] == ["(absent)", "a"]


def test_a_log_without_a_label_says_so(tmp_path: Path) -> None:
    """Its user gave no SQL."""
    file = tmp_path / "own.dsjson"
    file.write_text('{"c": {"x": 1}}\n')
    with pytest.raises(ImportFailed, match=r"own\.dsjson: expected decisions with _label_cost"):
        checked(file, "dsjson")


HDF5: dict[str, tuple[str, dict[str, Any], str]] = {
    "a scalar": ("d4rl", {"rewards": 5.0}, "scalar"),
    "scalar infos": ("d4rl", {"rewards": [1.0], "infos": 3}, "scalar"),
    "a name": ("minari", {"episode_x/rewards": [1.0]}, "invalid literal"),
    "a value": ("minari", {"episode_0": 5}, "Field names"),
    "flags": (
        "minari",
        {f"episode_0/{name}": [1.0, 0.0] for name in ("rewards", "observations", "actions")}
        | {"episode_0/terminations": [0, 1], "episode_0/truncations": [1, 0, 1]},
        "broadcast",
    ),
    "observations": (
        "minari",
        {f"episode_0/{name}": [1.0] for name in ("rewards", "terminations", "truncations")}
        | {"episode_0/observations": [[1.0]] * 4, "episode_0/actions": [1]},
        "observations has 4 rows for 1 steps",
    ),
}


@pytest.mark.parametrize("case", HDF5)
def test_datasets_of_other_shapes_are_refused_by_the_file(case: str, tmp_path: Path) -> None:
    """No error of h5py or numpy reaches the user."""
    name, datasets, message = HDF5[case]
    with h5py.File(tmp_path / "odd.hdf5", "w") as file:
        for key, value in datasets.items():
            file[key] = value
    with pytest.raises(ImportFailed, match=rf"odd\.hdf5: expected the datasets .*{message}"):
        checked(tmp_path / "odd.hdf5", name)


def test_an_episode_may_have_no_steps_but_not_lack_a_column(tmp_path: Path) -> None:
    """That the first one has."""
    with h5py.File(tmp_path / "odd.hdf5", "w") as file:
        for number, steps in enumerate((2, 0, 1)):
            group = file.create_group(f"episode_{number}")
            for name in ("actions", "rewards", "terminations", "truncations"):
                group[name] = np.zeros(steps)
            group["observations"] = np.zeros((steps + 1, 2))
            group["infos/logp"] = np.full(steps + 1, -0.5)
    assert checked(tmp_path / "odd.hdf5", "minari", action_logp="infos.logp").steps == 3
    with h5py.File(tmp_path / "odd.hdf5", "a") as file:
        del file["episode_2/infos"]
    assert checked(tmp_path / "odd.hdf5", "minari").steps == 3
    with pytest.raises(ImportFailed, match=r"odd\.hdf5: expected infos\.logp in all episodes"):
        checked(tmp_path / "odd.hdf5", "minari", action_logp="infos.logp")


def rewritten(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file of RLlib's batches with a change of each batch."""
    (file,) = (FILES / "rllib").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    made = tmp_path / "batches.json"
    made.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def test_compressed_batches_are_refused_by_column(tmp_path: Path) -> None:
    """They are pickles in lz4."""
    with pytest.raises(ImportFailed, match="obs: expected a list of steps, got a compressed col"):
        checked(FILES / "rllib_compressed", "rllib")
    several = rewritten(tmp_path, lambda batch: batch.update(type="MultiAgentBatch"))
    with pytest.raises(ImportFailed, match="row 1: type: expected a SampleBatch"):
        checked(several, "rllib")


def test_batches_without_keys_or_flags_of_today(tmp_path: Path) -> None:
    """Old files have `dones`, and some no `eps_id`: episodes then end at the flags."""

    def older(batch: dict[str, Any]) -> None:
        batch["dones"] = [False] * (len(batch["t"]) - 1) + [True]
        for name in ("eps_id", "t", "terminateds", "truncateds", "action_logp"):
            del batch[name]

    report = checked(rewritten(tmp_path, older), "rllib")
    assert (report.episodes, report.steps) == (3, 12)


def test_batches_may_be_empty_or_of_other_numbers(tmp_path: Path) -> None:
    """A worker writes whole numbers or floats; a file without a batch says why."""
    file = rewritten(tmp_path, lambda batch: None)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    empty = {k: [] if isinstance(v, list) else v for k, v in lines[0].items()}
    lines[0]["rewards"] = [1] * len(lines[0]["rewards"])
    file.write_text("".join(json.dumps(line) + "\n" for line in (empty, *lines)))
    assert checked(file, "rllib").steps == 12
    file.write_text('["nothing"]\n')
    with pytest.raises(ImportFailed, match="got none; number 1, row: expected a batch of RLlib"):
        checked(file, "rllib")


def test_a_line_that_breaks_off_is_left_out_alone(tmp_path: Path) -> None:
    """A worker that was killed leaves one; a column of another length is as bad."""
    file = rewritten(tmp_path, lambda batch: None)
    lines = file.read_text().splitlines()
    short = json.dumps({**json.loads(lines[0]), "rewards": [1.0]})
    file.write_text("\n".join([short, *lines, lines[0][:300]]))
    report = checked(file, "rllib")
    assert (report.steps, report.rows_left_out, [bad.row for bad in report.bad]) == (12, 2, [1, 5])


def test_a_gap_in_an_episode_of_batches_is_an_error(tmp_path: Path) -> None:
    """But a file may begin in the middle of one."""

    def middle(batch: dict[str, Any]) -> None:
        batch["t"] = [t + 7 for t in batch["t"]]

    assert checked(rewritten(tmp_path, middle), "rllib").steps == 12

    def gap(batch: dict[str, Any]) -> None:
        batch["t"][-1] += 1

    report = checked(rewritten(tmp_path, gap), "rllib")
    assert (report.steps, report.rows_left_out) == (0, 12)
    assert report.bad[0].source == "batches.json"


def test_an_episode_of_batches_may_go_on_in_the_next_file(tmp_path: Path) -> None:
    """A worker begins a new file when one is full."""
    file = rewritten(tmp_path, lambda batch: None)
    first, cut, last = [json.loads(line) for line in file.read_text().splitlines()]
    head = {name: one[:1] if isinstance(one, list) else one for name, one in cut.items()}
    tail = {name: one[1:] if isinstance(one, list) else one for name, one in cut.items()}
    file.write_text(json.dumps(first) + "\n" + json.dumps(head))
    (tmp_path / "later.json").write_text(json.dumps(tail) + "\n" + json.dumps(last))
    report = checked(tmp_path, "rllib")
    assert (report.episodes, report.steps, report.bad) == (3, 12, [])


def test_a_batch_may_say_that_its_last_step_is_terminated_and_truncated(tmp_path: Path) -> None:
    """Then it is terminated."""

    def both(batch: dict[str, Any]) -> None:
        batch["terminateds"] = batch["truncateds"] = [False] * (len(batch["t"]) - 1) + [True]

    file = rewritten(tmp_path, both)
    (unit,) = rllib_batches.rllib(
        file, ImportOptions(source=file, format="rllib"), Workspace()
    ).units
    (block,) = unit.blocks(["terminateds", "truncateds"])
    assert sum(block.table["terminateds"].to_pylist()) == 3
    assert not any(block.table["truncateds"].to_pylist())


def test_given_options_replace_what_a_format_finds() -> None:
    """A group of alternatives is replaced as one; `sql` runs over the format's rows."""
    path = FILES / "d4rl.hdf5"
    report = checked(path, "d4rl", uniform=False, action_prob=None)
    assert report.understood["propensities"]["count"] == 12
    sql = (
        'SELECT * REPLACE (2 * rewards AS rewards), exp("infos/action_log_probs") AS p FROM source'
    )
    twice = checked(path, "d4rl", sql=sql, action_prob="p")
    assert twice.understood["returns"]["mean"] == pytest.approx(
        2 * report.understood["returns"]["mean"]
    )


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("d4r", "d4rl.hdf5", "expected one of cb_json, .*, got 'd4r'; did you mean d4rl?"),
        ("d4rl", "nothing.h5", "expected a file or a folder, got none"),
        ("d4rl", "rllib_episodes/0.parquet", "expected HDF5"),
        ("minari", "d3rlpy.h5", "expected groups episode_0"),
        ("minari", "rllib", "expected one file main_data.hdf5 of a Minari data set"),
        ("d4rl", "minari/toy-v0/data/main_data.hdf5", "expected rewards"),
        ("rllib", "vw.dsjson", "row 1: expected a batch of RLlib with obs, got _label_cost"),
        (
            "rllib-episodes",
            "lerobot_v3/data/chunk-000/file-000.parquet",
            "expected a column `item`",
        ),
        ("lerobot", "minari", "expected the description of a LeRobot data set"),
        ("obd", "vw.dsjson", "expected CSV with the columns timestamp"),
        ("dsjson", "obd/random/all/all.csv", "expected lines of JSON"),
    ],
)
def test_another_file_is_refused_by_name(name: str, source: str, message: str) -> None:
    """The message says what the format has."""
    with pytest.raises(ImportFailed, match=message):
        checked(FILES / source, name)


def test_every_format_is_tested() -> None:
    """`headrace` has a file of its own."""
    modules = (hdf5, lerobot, obd, rllib_batches, rllib_episodes, shards, vw)
    named = {name for name in FORMATS for one in modules if hasattr(one, name.replace("-", "_"))}
    assert named == {*FORMATS}
    assert {format_of(name) for name in SOURCES} | {"headrace", "cb_json"} == named


def test_arrays_become_numbers_texts_or_lists() -> None:
    """A row of one number is that number; masked rows are null."""
    masked = np.ma.MaskedArray(np.ones((2, 2, 1)), [[[True]] * 2, [[False]] * 2])
    assert arrow_column(masked).to_pylist() == [None, [1.0, 1.0]]
    assert arrow_column(np.array([[3], [4]])).to_pylist() == [3, 4]
    assert arrow_column(np.array([b"a", "b", None], object)).to_pylist() == ["a", "b", None]


@pytest.mark.parametrize("at", [0, 1], ids=["lists", "arrays"])
def test_steps_that_a_packed_episode_looks_back_on_are_not_its_own(at: int, tmp_path: Path) -> None:
    """A chunk has steps of the one before, which has them too."""
    packed = pq.read_table(FILES / "rllib_episodes")["item"].to_pylist()
    state = msgspec.msgpack.decode(packed[at])
    for one in (state, state["extra_model_outputs"]):
        for name in ("observations", "actions", "rewards", "action_logp"):
            if name in one:
                one[name]["lookback"] = 1
    state["t_started"] = 1
    file = tmp_path / "e.parquet"
    pq.write_table(pa.table({"item": [msgspec.msgpack.encode(state)]}), file)
    report = checked(file, "rllib-episodes")
    rewards = expected("rllib_episodes")[at]["rewards"][1:]
    assert report.steps == len(rewards)
    assert report.understood["returns"]["mean"] == pytest.approx(sum(rewards))


def test_a_robots_data_set_may_have_neither_rewards_nor_ends(tmp_path: Path) -> None:
    """And images beside the numbers: notes say what is missing and what is left out."""
    info = json.loads((FILES / "lerobot_v3" / "meta" / "info.json").read_text())
    features = info["features"]
    features["observation.image"] = {"dtype": "video", "shape": [3, 4, 4], "names": None}
    for name in ("next.reward", "next.done"):
        del features[name]
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    table = pq.read_table(FILES / "lerobot_v3" / "data").drop(["next.reward", "next.done"])
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "0.parquet")
    report = checked(tmp_path, "lerobot")
    assert (report.episodes, report.steps) == (3, 12)
    assert report.understood["returns"]["high"] == 0
    assert [note.partition(":")[0] for note in report.notes] == [
        "observation.image",
        "the data set has no next.reward",
        "the data set has no next.done",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": 5}, "expected the description of a LeRobot data set: TypeError"),
        ({"action": {"shape": [1]}}, "KeyError: 'dtype'"),
        ({"observation.state": {"dtype": "video"}}, "expected columns of the observation, got"),
    ],
)
def test_descriptions_of_other_robots(tmp_path: Path, change: Any, message: str) -> None:
    """Of other forms, and without an observation of numbers."""
    shutil.copytree(FILES / "lerobot_v2", tmp_path / "set")
    info = tmp_path / "set" / "meta" / "info.json"
    document = json.loads(info.read_text())
    document["features"] |= change
    info.write_text(json.dumps(document))
    with pytest.raises(ImportFailed, match=message):
        checked(tmp_path / "set", "lerobot")


def test_objects_in_packed_episodes_are_refused(tmp_path: Path) -> None:
    """msgpack-numpy pickles an array of Python objects, which nothing here reads."""
    (packed,) = pq.read_table(FILES / "rllib_episodes")["item"].to_pylist()[1:2]
    state = msgspec.msgpack.decode(packed)
    state["actions"]["data"][b"kind"] = b"O"
    file = tmp_path / "e.parquet"
    pq.write_table(pa.table({"item": [msgspec.msgpack.encode(state)]}), file)
    with pytest.raises(ImportFailed, match="expected arrays of numbers, got one of Python objects"):
        checked(file, "rllib-episodes")
    pq.write_table(pa.table({"item": [msgspec.msgpack.encode({"id_": 1})]}), file)
    with pytest.raises(ImportFailed, match="expected packed episodes of RLlib: KeyError"):
        checked(file, "rllib-episodes")
