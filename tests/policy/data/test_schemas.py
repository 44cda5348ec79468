"""A policy whose spaces were changed: a job reads one schema, and reports the rows left out."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from policy.algorithms.bandit import BanditConfig
from policy.data.freeze import NothingToFreeze, freeze, load_frozen
from policy.data.schemas import require_fit
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.judging.evaluate import evaluate
from policy.judging.gate import publish
from policy.judging.settings import EvaluationSettings, Gate
from policy.training.settings import FollowSettings, TrainSettings
from policy.training.train import NothingToTrainOn, train, train_once
from policy.training.train_live import follow
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import NothingYet
from storage.experience.interfaces import MixedSchemas
from storage.spaces.descriptors import Discrete, parse_space
from tests.policy.changed_spaces import log

ONCE = BanditConfig(epochs=1)
ACTION = Discrete(2)


@pytest.fixture
def changed(tmp_path: Path) -> tuple[Path, str, str]:
    """(root, old schema of 30 rows, declared schema of 50 rows)."""
    old = log(tmp_path, (parse_space("box:2"), ACTION), 30)
    log(tmp_path, (parse_space("box:2::-1:1"), ACTION), 7, "another")
    return tmp_path, old, log(tmp_path, (parse_space("box:3"), ACTION), 50)


def test_the_declared_schema_is_trained_on_and_judged_by(changed: tuple[Path, str, str]) -> None:
    """Rows of the schema before the change, and of other policies, are counted as not read."""
    root, _, new = changed
    result = train(root, settings=TrainSettings(evaluation_share=0.5), algorithm=ONCE)
    assert result.rows_trained + result.rows_held_out == 50
    assert result.not_read == {"other_schema": 30, "other_policy": 7}
    judged = evaluate(root, weights=result.candidate)
    assert judged.episodes == result.rows_held_out
    assert judged.not_read["other_schema"] == 30
    frozen = freeze(root)
    assert (frozen.schema_id, frozen.rows, frozen.other_schemas) == (new, 50, 30)
    again = freeze(root)
    assert (again.unchanged, again.other_schemas) == (True, 30)
    done = train_once(root, "default", ONCE, load_frozen(frozen.path))
    assert done["not_read"] == {}


def test_a_follower_reads_the_declared_schema(changed: tuple[Path, str, str]) -> None:
    """It trains on the rows since the change, and ignores the others."""
    root, _, new = changed
    updates: list[Any] = []
    asked = count()
    result = follow(
        root,
        settings=FollowSettings(steps_per_update=50),
        config=ONCE,
        on_update=updates.append,
        stop=lambda: bool(updates) or next(asked) > 600,
    )
    assert result.rows_read == 50
    lineage = WeightStore(root, "default").lineage(result.version)
    assert [stream.rpartition("-")[2] for stream in lineage] == [new]


def test_another_schema_is_read_where_it_fits(tmp_path: Path) -> None:
    """The log from before a category was added can be read; an unknown schema raises."""
    country = Discrete.of(["DE", "FR"])
    old = log(tmp_path, (country, ACTION), 30)
    new = log(tmp_path, (Discrete.of(["DE", "FR", "IT"]), ACTION), 50)
    result = train(
        tmp_path, settings=TrainSettings(schema_id=old, evaluation_share=0.5), algorithm=ONCE
    )
    assert result.rows_trained + result.rows_held_out == 30
    assert result.not_read == {"other_schema": 50}
    judged = evaluate(
        tmp_path, settings=EvaluationSettings(schema_id=old), weights=result.candidate
    )
    assert (judged.episodes, judged.not_read["other_schema"]) == (result.rows_held_out, 50)
    assert freeze(tmp_path, schema_id=old).rows == 30
    assert freeze(tmp_path, schema_id=new).rows == 50
    with pytest.raises(NothingToTrainOn, match="other schema: 80"):
        train(tmp_path, settings=TrainSettings(schema_id="0123456789ab"), algorithm=ONCE)
    with pytest.raises(NothingToFreeze, match="other schemas: 80 rows"):
        freeze(tmp_path, schema_id="0123456789ab")


def test_a_schema_that_nothing_has_may_come_unless_another_is_declared(tmp_path: Path) -> None:
    """A mistyped schema is not waited for; before a declaration, nobody can tell."""
    (tmp_path / "shards").mkdir()
    spec = PolicySpec(parse_space("box:2"), ACTION)
    with pytest.raises(NothingYet):
        freeze(tmp_path, schema_id="0123456789ab")
    with pytest.raises(NothingYet):
        train(tmp_path, settings=TrainSettings(schema_id="0123456789ab"), algorithm=ONCE, spec=spec)
    declared = PolicyDeclaration(observation=spec.observation, action=spec.action)
    save_declaration(tmp_path, declared)
    with pytest.raises(NothingYet):
        freeze(tmp_path, schema_id=declared.schema_id)
    reason = f"declared with schema {declared.schema_id}, not 0123456789ab"
    with pytest.raises(NothingToFreeze, match=reason):
        freeze(tmp_path, schema_id="0123456789ab")
    with pytest.raises(NothingToTrainOn, match=reason):
        train(tmp_path, settings=TrainSettings(schema_id="0123456789ab"), algorithm=ONCE)


def test_a_schema_that_does_not_fit_is_refused(changed: tuple[Path, str, str]) -> None:
    """The error names both schemas and the place, and comes before any training."""
    root, old, new = changed
    with pytest.raises(
        ValueError, match=rf"schema {old}: observation: .*\(3,\).*{new} has it, got"
    ):
        train(root, settings=TrainSettings(schema_id=old), algorithm=ONCE)
    candidate = train(root, algorithm=ONCE).candidate
    with pytest.raises(ValueError, match=f"schema {old}: observation"):
        evaluate(root, settings=EvaluationSettings(schema_id=old), weights=candidate)
    with pytest.raises(ValueError, match=f"schema {old}: observation"):
        train_once(root, "default", ONCE, freeze(root, schema_id=old))


def test_a_live_version_of_other_spaces_is_no_bar(tmp_path: Path) -> None:
    """The gate does not publish, and its reason says that they cannot be compared."""
    log(tmp_path, (parse_space("box:2"), ACTION), 30)
    first = train(tmp_path, algorithm=ONCE).candidate
    WeightStore(tmp_path, "default").publish(first)
    log(tmp_path, (parse_space("box:3"), ACTION), 50)
    result = train(tmp_path, algorithm=ONCE)
    document = publish(tmp_path, "default", result.candidate, Gate(reward_range=(0, 1)))
    assert document["published"] is False
    reason = "live_observation_space: live version 1 has another observation space: use a canary"
    assert reason in document["gate"]["reasons"]


def test_without_a_declaration_one_of_several_has_to_be_named(changed: Any) -> None:
    """The error names the option of the command line."""
    root, old, _ = changed
    (root / "policies" / "default.json").unlink()
    with pytest.raises(MixedSchemas, match=r"pass schema_id= \(--schema-id\)"):
        train(root, algorithm=ONCE)
    with pytest.raises(ValueError, match=r"3 schemas: .*pass schema_id= \(--schema-id\)"):
        freeze(root)
    result = train(
        root, settings=TrainSettings(schema_id=old, evaluation_share=0.0), algorithm=ONCE
    )
    assert result.rows_trained == 30
    assert result.not_read == {"other_schema": 50, "other_policy": 7}


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        ("box:2", "box:2::-1:1", True),
        ("box:2", "box:2:float64", False),
        ("discrete:2", "discrete:3", True),
        ("discrete:3", "discrete:2", False),
        ("discrete:2:1", "discrete:3", True),
        ('discrete:["a"]', 'discrete:["a","b"]', True),
        ('discrete:["b"]', 'discrete:["a","b"]', False),
        ("discrete:2", 'discrete:["a","b"]', False),
        ('discrete:["a","b"]', "discrete:2", False),
        ("multi_discrete:2,3", "multi_discrete:2,4", True),
        ("multi_discrete:2,3", "multi_discrete:3,2", False),
        ("multi_binary:2", "multi_binary:2", True),
        ("multi_binary:2", "multi_discrete:2,2", False),
        ('{"a": "box:1"}', '{"a": "box:1", "b": "box:1"}', False),
        ('{"a": "box:1", "b": "box:1"}', '{"a": "box:1"}', False),
        ("text:4", "text:3", True),
    ],
)
def test_what_fits(stored: str, wanted: str, fits: bool) -> None:
    """Stored rows fit if they are valid in the wanted spaces: same columns, known choices."""
    pair = (parse_space(stored), ACTION), (parse_space(wanted), ACTION)
    if fits:
        require_fit(*pair)
        return
    with pytest.raises(ValueError, match=r"schema \w{12}: observation"):
        require_fit(*pair)
