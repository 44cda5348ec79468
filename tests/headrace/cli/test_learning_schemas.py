"""`--schema-id`, and how the commands report rows left out for their schema."""

from __future__ import annotations

from pathlib import Path

from storage.spaces.descriptors import Discrete, parse_space
from tests.headrace.command import answer, headrace, refused
from tests.policy.changed_spaces import log


def test_changed_spaces_are_told_and_can_be_chosen(tmp_path: Path) -> None:
    """`train`, `freeze` and `evaluate` read the declared schema, or the one of --schema-id."""
    old = log(tmp_path, (Discrete(2), Discrete(2)), 30)
    log(tmp_path, (Discrete(3), Discrete(2)), 50)
    root = ("--root", tmp_path)
    trained = headrace("train", *root, "--epochs", "1")
    assert trained.returncode == 0, trained.stderr
    assert "not read: of other spaces" in trained.stdout
    frozen = headrace("freeze", *root)
    assert frozen.stderr == "left out: other schemas: 30 rows\n"
    chosen = ("--schema-id", old, "--json")
    assert answer(headrace("freeze", *root, *chosen))["rows"] == 30
    assert answer(headrace("train", *root, *chosen))["not_read"] == {"other_schema": 50}
    (judged,) = answer(headrace("evaluate", *root, *chosen))["logs"]
    assert judged["not_read"]["other_schema"] == 50
    manifest = ("--manifest", answer(headrace("freeze", *root, "--json"))["manifest"])
    for command in ("train", "evaluate"):
        result = headrace(command, *root, *manifest, "--schema-id", old)
        assert refused(result, "--schema-id: expected none")


def test_a_schema_that_does_not_fit_is_told(tmp_path: Path) -> None:
    """Status 2, and the place where the schema does not fit."""
    old = log(tmp_path, (parse_space("box:2"), Discrete(2)), 30)
    log(tmp_path, (parse_space("box:3"), Discrete(2)), 50)
    result = headrace("train", "--root", tmp_path, "--schema-id", old)
    assert refused(result, f"schema {old}: observation: expected", "shape (2,)")
