"""A scorecard has every policy, also one that cannot be judged."""

from __future__ import annotations

from pathlib import Path

from policy.judging.scorecard import scorecard
from policy.judging.settings import EvaluationSettings
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Box, Discrete
from tests.collector_process import declare
from tests.ingest.client.test_local_inference import publish


def test_one_policy_without_a_version_hides_no_other(tmp_path: Path) -> None:
    """Each has its version, or why it could not be judged."""
    declare(tmp_path)
    publish(tmp_path, 1)
    spaces = {"observation": Box((4,)), "action": Discrete(2)}
    save_declaration(tmp_path, PolicyDeclaration(policy_id="fresh", **spaces))
    (tmp_path / "weights" / "not a policy").mkdir()
    found = scorecard(tmp_path, EvaluationSettings(retry_for=0.0))
    odd = found.pop("not a policy")
    assert "policy id: expected" in odd["error"]
    assert {name: one["version"] for name, one in found.items()} == {"default": 1, "fresh": None}
    assert [one["verdict"] for one in found["default"]["logs"]] == ["cannot tell"]
    assert (found["fresh"]["logs"], bool(found["fresh"]["error"])) == ([], True)
