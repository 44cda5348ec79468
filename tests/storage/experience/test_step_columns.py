"""The table of step columns, and the declarations that are written beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ingest.episodes.journal_events import Acted, Imported, Started
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.policy_rules import PolicyRules
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.step_columns import (
    ADDED_COLUMNS,
    NUMBER_BYTES,
    STEP_COLUMNS,
    StepBuffers,
    StepColumn,
)
from storage.spaces.descriptors import parse_space

NAMES = [column.name for column in STEP_COLUMNS]


def test_each_column_has_its_buffer_and_its_fields() -> None:
    """A column is a buffer of parts, and a field of the journal's events unless they imply it."""
    others = {"obs", "actions", "dist_inputs"}
    lengths = {"obs_lengths", "actions_lengths", "dist_lengths"}
    assert {*StepBuffers.__struct_fields__} == {*NAMES} | others | lengths
    renamed = {"rewards": "reward"}
    acted = {renamed.get(name, name) for name in NAMES} - {"received_ts"}  # of the row
    assert acted <= {*Acted.__struct_fields__}
    assert {*NAMES} - {"received_ts"} <= {*Imported.__struct_fields__}
    assert all(column.name in Acted.__struct_fields__[-9:] for column in ADDED_COLUMNS)


def test_an_action_fills_every_column() -> None:
    """`OpenEpisode.act` is written out because it is hot: each column gets one value a step."""
    spaces = {"observation": parse_space("box:1"), "action": parse_space("discrete:2")}
    rules = PolicyRules.of(PolicyDeclaration(**spaces))
    start = Started(1, "e", "i", 0, "default", rules.schema_id, True, "{}", None, 5, agent_id="a")
    episode = OpenEpisode(start, rules, 0, 0.0)
    values = {"env_t": 3, "policy_version": 7, "pass_prob": 0.5, "source": 2, "action_logp": -0.25}
    fields = {
        "key": 1, "seq": 1, "obs": bytes(4), "action": bytes(8), "reward": 2.0, "info": "",
        "dist_inputs": b"", "ts": 11, **values,
    }  # fmt: skip
    for seq in (1, 2):
        episode.act(Acted(**{**fields, "seq": seq, "env_t": seq}), 13, 0, 0.0)
    part = episode.cut(1)[0]
    expected = {**values, "env_t": 1, "rewards": 2.0, "ts": 11, "received_ts": 13}
    for column in STEP_COLUMNS:
        found = np.frombuffer(getattr(part, column.name), column.dtype)
        assert found.tolist() == [expected[column.name]], column.name


@pytest.mark.parametrize("column", STEP_COLUMNS, ids=NAMES)
def test_one_value_that_does_not_fit_is_found(column: StepColumn) -> None:
    """`fits` and `unfit` agree: finite, and within the bounds of the table."""
    fine = 1.0 if column.is_real else 1
    beyond = [column.low - 1, column.high + 1] if not math.isinf(column.low) else []
    beyond += [math.nan, math.inf] if column.is_real else []
    beyond += [column.low] if column.open_low else []
    dtype = np.float64 if column.is_real else np.int64
    assert column.fits(np.array([fine, fine], dtype))
    for value in beyond:
        values = np.array([fine, value, fine], dtype)
        assert column.unfit(values).tolist() == [False, True, False]
        assert not column.fits(values)


def test_a_buffer_of_defaults_has_its_size() -> None:
    """The sizes of parts count the columns that are not sparse."""
    sizes = [len(column.filled(3)) for column in STEP_COLUMNS if not column.sparse]
    assert sum(sizes) == 3 * NUMBER_BYTES
    required = [column.name for column in STEP_COLUMNS if column.is_required]
    assert required == ["rewards"]
