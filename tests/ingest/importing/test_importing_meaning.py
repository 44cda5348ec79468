"""What the columns of a log mean, by the cases that people report: each has the right value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pytest

from ingest.importing.importing import import_table
from ingest.importing.inference import infer_spaces
from ingest.importing.options import ImportArguments, ImportOptions
from ingest.importing.report import ImportReport
from ingest.protocol.errors import ImportFailed
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary
from tests.collector_process import CollectorProcess, shard_rows

BANDIT: dict[str, Any] = {"observation": ["x"], "action": "a", "reward": "r"}


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., tuple[ImportReport, list[dict[str, Any]]]]:
    """Declares the spaces of a source, imports it, and returns the rows of the shards."""

    def run(source: Any, **given: Any) -> tuple[ImportReport, list[dict[str, Any]]]:
        options = {**BANDIT, **given}
        observation, action = infer_spaces(ImportOptions(source=source, **options))
        root = tmp_path / "root"
        save_declaration(root, PolicyDeclaration(observation=observation, action=action))
        with CollectorProcess(root) as collector:
            report = import_table(source, address=collector.address, **options)
            assert collector.stop() == 0
        return report, shard_rows(root)

    return run


def flat(lengths: dict[str, int]) -> Any:
    """Rows in order, whose episodes end in the ways that their names say."""
    ends = [(how, t == steps - 1) for how, steps in lengths.items() for t in range(steps)]
    return pa.table(
        {
            "x": np.arange(len(ends), dtype=float),
            "a": [n % 2 for n in range(len(ends))],
            "r": [1.0] * len(ends),
            "terminal": [last and how.startswith("terminated") for how, last in ends],
            "timeout": [last and how.startswith("truncated") for how, last in ends],
        }
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["terminated", "truncated"], [(5, "terminated"), (4, "truncated"), (3, "terminated")]),
        (["terminated"], [(5, "terminated"), (7, "terminated")]),
        (["truncated"], [(9, "truncated"), (3, "truncated")]),
    ],
)
def test_episodes_without_a_key_end_at_the_flags(
    flags: list[str], expected: list[tuple[int, str]], imported: Any
) -> None:
    """The layout of offline RL has no column of episodes. The rest of a file is truncated."""
    names = {"terminated": "terminal", "truncated": "timeout"}
    log = flat({"terminated": 5, "truncated": 4, "terminated again": 3})
    report, rows = imported(log, **{flag: names[flag] for flag in flags})
    lengths = Counter(row["eps_id"] for row in rows)
    ended = [
        (lengths[row["eps_id"]], row["ended"]) for row in rows if isinstance(row["ended"], str)
    ]
    assert sorted(ended) == sorted(expected)
    assert [row["t"] for row in sorted(rows, key=lambda row: row["obs"][0])][:5] == [*range(5)]
    rest = [note for note in report.notes if "after the last row" in note]
    assert bool(rest) == (flags == ["truncated"])


def test_flags_that_are_never_true_are_refused_or_said() -> None:
    """Without a key they would make one episode of the whole file."""
    log = flat({"open": 4})
    with pytest.raises(ImportFailed, match=r"expected rows where terminal is true.*got none in 4"):
        import_table(log, **BANDIT, terminated="terminal", check=True)
    report = import_table(
        log.append_column("e", pa.array([0, 0, 1, 1])), **BANDIT, terminated="terminal",
        episode="e", check=True,
    )  # fmt: skip
    assert report.notes == ["column terminal is true in no row"]


def test_a_density_may_be_above_1(imported: Any) -> None:
    """Of a continuous action; the probability of a choice may be so only by a rounding error."""
    log = pa.table({"x": [1.0, 2.0, 3.0], "a": [0.25, 0.5, 0.4], "r": [1.0, 0.0, 0.0]})
    report, rows = imported(log.append_column("p", pa.array([2.15, 7.99, 0.3])), action_prob="p")
    assert report.rows_left_out == 0
    logs = sorted(row["action_logp"] for row in rows)
    assert logs == pytest.approx([np.log(0.3), np.log(2.15), np.log(7.99)])


def test_a_probability_above_1_is_refused_and_its_bias_is_said() -> None:
    """The message names the other option; what is left is a selection."""
    log = pa.table({"x": [1.0] * 3, "a": [0, 1, 0], "r": [1.0] * 3, "p": [1.0000001, 2.15, 0.3]})
    report = import_table(log, **BANDIT, action_prob="p", check=True)
    assert (report.steps, report.rows_left_out) == (2, 1)
    assert report.bad[0].reason.endswith("got 2.15; logarithms of probabilities are action_logp")
    assert "selected by its likelihood" in report.notes[0]
    assert report.understood["propensities"]["high"] == 1.0


@pytest.mark.parametrize("given", [{"sample_prob": "kept"}, {"sample_weight": "weight"}])
def test_a_sampled_log_gives_the_mean_of_the_whole_one(
    given: dict[str, str], imported: Any
) -> None:
    """All clicks and a tenth of the rest were kept; weighted, the mean is that before sampling."""
    clicks = [1.0] * 150 + [0.0] * 185
    kept = [1.0 if click else 0.1 for click in clicks]
    log = pa.table(
        {"x": [1.0] * 335, "a": [n % 2 for n in range(335)], "r": clicks, "kept": kept,
         "weight": [1 / one for one in kept]}
    )  # fmt: skip
    _, rows = imported(log, uniform=True, **given)
    weights = [1 / row["pass_prob"] for row in rows]
    mean = sum(row["rewards"] * w for row, w in zip(rows, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(150 / 2_000)


def test_a_constant_share_is_a_number() -> None:
    """A share above 1 is refused, and so is a cell that is a weight."""
    with pytest.raises(ImportFailed, match=r"sample_prob: expected .* in \(0, 1\], got 10"):
        ImportOptions(source="log.csv", **BANDIT, sample_prob=10)
    log = pa.table({"x": [1.0] * 2, "a": [0, 1], "r": [1.0] * 2, "w": [10.0, 0.5]})
    one = [import_table(log, **BANDIT, sample_prob=p, check=True) for p in (1, 1.0, np.float32(1))]
    assert len({report.name for report in one}) == 1
    report = import_table(log, **BANDIT, sample_prob="w", check=True)
    assert "its inverse is a sample_weight" in report.bad[0].reason


def test_the_first_of_repeated_rows_is_kept(imported: Any) -> None:
    """Whatever lies between them; rows without a key are all kept, and the others counted."""
    keys = ["u", "v", "u", None, None, "v"]
    log = pa.table({"x": [float(n) for n in range(6)], "a": [0, 1] * 3, "r": [1.0] * 6, "k": keys})
    report, rows = imported(log, dedupe=["k"])
    assert sorted(row["obs"][0] for row in rows) == [0.0, 1.0, 3.0, 4.0]
    assert (report.rows, report.steps, report.rows_repeated) == (6, 4, 2)


def test_repeated_times_are_said() -> None:
    """A row that a log has twice would be a second step, with a second reward."""
    log = pa.table({"x": [1.0] * 4, "a": [0, 1] * 2, "r": [1.0] * 4, "e": [1, 1, 1, 2]})
    log = log.append_column("t", pa.array([5, 5, 6, 5]))
    report = import_table(log, **BANDIT, episode="e", time="t", check=True)
    assert report.notes[0].startswith("1 row has the time of another row of the same episode")
    once = import_table(log, **BANDIT, episode="e", time="t", dedupe=["e", "t"], check=True)
    assert (once.notes, once.steps, once.rows_repeated) == ([], 3, 1)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.0, 3.0, 2.0]),
        pa.array(["1", "3.0", None]),
        pa.array([Decimal("1.00"), Decimal("3.00"), Decimal("2.00")]),
    ],
)
def test_whole_numbers_are_choices_whatever_their_type(column: Any) -> None:
    """By hand they are numbers. Other numbers are never choices."""
    log = {"x": [1.0] * 3, "a": column, "r": [1.0] * 3}
    options = {**BANDIT, "action": "a:box"}
    found = infer_spaces(ImportOptions(source=pa.table(log), **BANDIT))[1]
    assert isinstance(found, Discrete)
    assert found.start == 1
    assert isinstance(infer_spaces(ImportOptions(source=pa.table(log), **options))[1], Box)
    halves = pa.table({**log, "a": [0.5, 1.0, 2.0]})
    discrete = ImportOptions(source=halves, **{**BANDIT, "action": "a:discrete"})
    with pytest.raises(ImportFailed, match="expected whole numbers"):
        infer_spaces(discrete)


def test_a_cost_is_subtracted() -> None:
    """Next to a reward, and alone."""
    log = pa.table({"x": [1.0] * 2, "a": [0, 1], "r": [1.0, 2.0], "cost": [0.25, 0.5]})
    for reward, mean in (("-cost", -0.375), (["r", "-cost"], 1.125)):
        report = import_table(log, **{**BANDIT, "reward": reward}, check=True)
        assert report.understood["rewards"]["mean"] == mean


TENSOR = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.float32(), [2, 2]),
    pa.array([[1.0, 2, 3, 4]] * 2, pa.list_(pa.float32(), 4)),
)


@pytest.mark.parametrize(
    "column",
    [
        TENSOR,
        pa.array([[1.0, 2.0]] * 2, pa.list_view(pa.float32())),
        pa.array(["[1. 2.]"] * 2),
        pa.array([True, False]).cast(pa.bool_()),
    ],
)
def test_numbers_are_read_from_any_type_that_holds_them(column: Any) -> None:
    """Tensors, views of lists, and the text that numpy prints."""
    log = pa.table({"x": column, "a": [0, 1], "r": [1.0, 0.0]})
    assert import_table(log, **BANDIT, check=True).steps == 2


def test_a_structure_is_named_with_its_keys(tmp_path: Path) -> None:
    """The message says how to take a value, by its path or in SQL."""
    rows = [{"c": {"User": {"hour": n}, "_multi": []}, "a": n % 2, "r": 1.0} for n in range(4)]
    path = tmp_path / "log.dsjson"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ImportFailed, match=r"the keys User, _multi: .* c\.KEY, .*SQL"):
        import_table(path, **{**BANDIT, "observation": ["c"]}, check=True)
    nested = pa.Table.from_pylist(rows)
    for source in (path, nested):
        found = import_table(
            source, **{**BANDIT, "observation": ["c.User.hour"]}, name="n", check=True
        )
        assert (found.steps, found.bad) == (4, [])


def test_a_row_that_is_a_batch_is_refused(tmp_path: Path) -> None:
    """A reward that is a list would otherwise declare the steps of a batch as one vector."""
    path = tmp_path / "log.json"
    path.write_text('{"x": [[0.1], [0.2]], "a": [0, 1], "r": [1.0, 1.0]}\n')
    with pytest.raises(ImportFailed, match=r"column r: .* got a list: .* batch of steps"):
        infer_spaces(ImportOptions(source=path, **BANDIT))


def test_a_wrong_argument_names_the_nearest() -> None:
    """In Python the plural is easily forgotten, and a name given instead of a mapping."""
    log = pa.table({"x": [1.0], "a": [0], "r": [1.0]})
    wrong: dict[str, Any] = {"tag": {"user": "u"}}
    with pytest.raises(TypeError, match=r"import_table\(\).*'tag'; did you mean tags\?"):
        import_table(log, **BANDIT, **wrong)
    with pytest.raises(TypeError, match=r"unexpected argument 'zzz'$"):
        import_table(log, **BANDIT, zzz=1)
    with pytest.raises(ImportFailed, match="tags: expected a mapping, such as a dict, got 'user'"):
        import_table(log, **BANDIT, tags="user")


def test_the_arguments_are_the_fields_of_the_options() -> None:
    """Type checkers read the one, and the code the other."""
    fields = get_type_hints(ImportOptions)
    del fields["source"]
    assert get_type_hints(ImportArguments) == fields


def test_a_row_whose_mask_forbids_its_action_is_left_out_and_named(tmp_path: Path) -> None:
    """So is one whose mask allows nothing; the rows beside them are stored."""
    spaces = Dict({"action_mask": MultiBinary((3,)), "x": Box(())}), Discrete(3)
    save_declaration(tmp_path, PolicyDeclaration(observation=spaces[0], action=spaces[1]))
    masks = [[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 1]]
    log = pa.table({"action_mask": masks, "x": [0.5] * 4, "a": [1, 1, 2, 2], "r": [1.0] * 4})
    with CollectorProcess(tmp_path) as collector:
        report = import_table(
            log,
            address=collector.address,
            **{**BANDIT, "observation": ["action_mask", "x"]},
        )
        assert collector.stop() == 0
    assert report.rows_left_out == 2
    named = [str(row) for row in report.bad]
    assert len(named) == 2
    assert all("expected an action that obs.action_mask allows" in text for text in named)
    assert sorted(row["actions"] for row in shard_rows(tmp_path)) == [1, 2]
