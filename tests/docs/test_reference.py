"""The hand-written reference pages list exactly the fields of the code."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pyarrow.parquet as pq

from headrace import PolicyDeclaration, ShardReader, load_declarations, parse_space
from storage.reading.loading import DEFAULT_COLUMNS
from tests.collector_process import CollectorProcess, declare

PAGES = Path(__file__).parents[2] / "docs"


def first_cells(text: str) -> list[str]:
    """The code spans in the first cell of each table row."""
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_the_policy_file_has_these_fields_and_defaults(tmp_path: Path) -> None:
    """The page's example is a valid file."""
    page = (PAGES / "policy_file.md").read_text()
    table = page.partition("## Fields")[2].partition("## Spaces")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", table, re.MULTILINE)
    defaults = {
        one.name: one.default_factory() if one.default is MISSING else one.default
        for one in fields(PolicyDeclaration)
        if one.default is not MISSING or one.default_factory is not MISSING
    }
    assert {name: json.loads(text) for name, text in rows} == json.loads(json.dumps(defaults))
    assert set(first_cells(table)) == {one.name for one in fields(PolicyDeclaration)}
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/default.json").write_text(example)
    assert load_declarations(tmp_path)["default"].reward_range == (0.0, 1.0)


def test_every_short_form_of_a_space_is_one() -> None:
    page = (PAGES / "policy_file.md").read_text().partition("## Spaces")[2]
    page = page.partition("In the file and in")[0]
    forms = first_cells(page)
    kinds = {type(parse_space(form)).__name__ for form in forms}
    assert kinds == {"Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "Dict"}


def test_every_column_of_a_shard_is_in_the_table(tmp_path: Path) -> None:
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        collector.post("/v1/episodes", {"episode_id": "a"})
        step = {"obs": [1, 2, 3, 4], "action": 1, "action_prob": 0.5}
        collector.post("/v1/episodes/a/log_action", step)
        collector.post("/v1/episodes/a/end", {})
        collector.settle(1)
        assert collector.stop() == 0
    (shard,) = tmp_path.glob("shards/*/*.parquet")
    cells = first_cells((PAGES / "shard_format.md").read_text())
    found = {name for name in cells if "<" not in name}
    assert found == set(pq.read_schema(shard).names)


def test_the_columns_that_a_reader_returns_are_named() -> None:
    page = (PAGES / "sample_batch.md").read_text().partition("**Columns.**")[2]
    page = page.partition("`columns=`")[0]
    described = str(ShardReader.__doc__).partition("Default:")[2].partition("Others")[0]
    for text in (page, described):
        named = set(re.findall(r"`(\w+)`", text)) - {"ShardReader"}
        assert named == set(DEFAULT_COLUMNS)
