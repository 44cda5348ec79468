"""`publish --canary`, `canary`, `promote`, `rollback` and `pause` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import urllib3

from headrace.cli.canaries import share_of, size_of
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace, process, refused
from tests.ingest.client.test_local_inference import SPEC, publish


def test_a_canary_from_its_start_to_its_end(tmp_path: Path) -> None:
    """Started, served, asked about, refused a promotion, rolled back; no publication meanwhile."""
    declare(tmp_path)
    publish(tmp_path, 1)
    store = WeightStore(tmp_path, "default")
    weights = Policy(SPEC, seed=2).get_weights()
    digest = store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={})
    at_root = ("--root", tmp_path, "--json")
    with CollectorProcess(tmp_path) as collector:
        paused = answer(process("pause", "--why", "a canary", *at_root))
        assert paused["pinned"]["why"] == "a canary"
        started = answer(headrace("publish", digest, "--canary", "10%", *at_root))
        assert (started["canary"], started["share"], started["needed"]) == (2, 0.1, None)
        assert started["served"]["state"] == "served"
        listed = headrace("versions", "--root", tmp_path).stdout
        assert "canary in 0.1 of the episodes" in listed
        again = headrace("publish", digest, "--canary", "10%", "--root", tmp_path)
        assert "acts in 0.1 of the episodes, as before" in again.stdout
        assert "canary_started" not in again.stderr
        answer(headrace("resume", *at_root))
        held = "version 1 is held by a canary (version 2 gets 0.1 of the episodes)"
        assert refused(headrace("publish", digest, "--no-gate", *at_root), held, status=6)
        not_pinned = headrace("resume", "--root", tmp_path).stdout
        assert "default was not pinned.\nIts canary goes on: version 2" in not_pinned
        page = urllib3.request("GET", collector.address).data.decode()
        assert "canary: version 2 in 0.1" in page
        assert "pinned" not in page
        asked = process("canary", *at_root)
        assert (asked.returncode, answer(asked)["verdict"]) == (4, "cannot tell")
        assert (answer(asked)["state"], answer(asked)["candidate"]) == ("too young", digest)
        shown = headrace("canary", "--root", tmp_path).stdout
        assert "Version 2 in 0.1" in shown
        assert "Compared: 0 episodes of the canary and 0 of the live version.\n" in shown
        assert "In shards, not compared yet: 0 too recent, 0 waiting" in shown
        assert "Open episodes of the policy, and those that await late rewards: 0.\n" in shown
        events = [
            {"type": "start", "episode_id": "new"},
            {"type": "log_action", "episode_id": "new", "obs": [0.5] * 4, "action": 1},
        ]
        assert collector.request("POST", "/v1/events", {"events": events})[0] == 200
        shown = headrace("canary", "--root", tmp_path).stdout
        assert "Open episodes of the policy, and those that await late rewards: 1.\n" in shown
        refusal = process("promote", *at_root)
        assert (refusal.returncode, answer(refusal)["promoted"]) == (4, False)
        assert "cannot tell" in refusal.stderr
        assert refused(headrace("rollback", "--to", "1", *at_root), "without --to ends the canary")
        ended = answer(headrace("rollback", "--why", "fewer clicks", *at_root))
        assert (ended["version"], ended["served"]["state"]) == (1, "served")
        answer(headrace("resume", *at_root))
        assert refused(headrace("rollback", "--to", "1", *at_root), "`headrace pause` pins")
        judged = headrace("publish", digest, "--canary", "0.5", "--min-ess", "5", *at_root)
        assert refused(judged, "nor an option of the gate", "`collect --reward-range LOW HIGH`")
        answer(headrace("publish", digest, "--canary", "0.5", *at_root))
        answer(headrace("pause", *at_root))
        assert "not pinned any more" in headrace("resume", "--root", tmp_path).stdout
        other = ("--candidate", "0" * 12)
        for command in ("canary", "promote", "rollback", "pause", "resume"):
            assert refused(headrace(command, *other, *at_root), "expected candidate", status=6)
            late = headrace(command, "--expect-generation", "1", *at_root)
            assert refused(late, "expected generation 1", status=6)
        own = ("--candidate", digest[:12])
        promoted = answer(headrace("promote", "--no-gate", *own, *at_root))
        assert (promoted["version"], promoted["served"]["state"]) == (2, "served")
        again = answer(headrace("promote", "--no-gate", *own, *at_root))
        assert (again["unchanged"], again["generation"]) == (True, promoted["generation"])
        here = ("--expect-generation", promoted["generation"])
        back = answer(headrace("rollback", "--why", "worse", *own, *here, *at_root))
        again = answer(headrace("rollback", "--why", "worse", *own, *here, *at_root))
        assert (again["unchanged"], again["version"]) == (True, back["version"])
        assert refused(headrace("rollback", "--why", "twice", *here, *at_root), status=6)
        assert collector.stop() == 0
    assert refused(headrace("promote", "--root", tmp_path), "expected a running canary")
    listed = headrace("decisions", "--root", tmp_path).stdout
    assert listed.count("cannot tell") == 2, listed
    lines = listed.splitlines()
    assert [
        lines.count(f"  version 2 acts in {share} of the episodes") for share in (0.1, 0.5)
    ] == [
        1,
        1,
    ]
    decided = [line.partition(f"  {digest[:12]}  promote: ")[2] for line in lines]
    assert [one for one in decided if one] == [
        "cannot tell, not promoted",
        "without a gate, live as version 2",
    ]
    assert lines.count("  its verdict was: cannot tell") == 1
    ended_at = lines.index("  rolled back the canary, version 2")
    assert lines[ended_at - 1].endswith(f"  {digest[:12]}  rollback: the canary ended")
    assert lines[ended_at + 1] == "  fewer clicks", "the reason outlives the pin"
    assert lines[ended_at + 2].startswith("  by ")


@pytest.mark.parametrize("text", ["0", "100%", "ten", "-5%", "1.0", "nan"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a share"):
        share_of(text)


def test_shares() -> None:
    assert share_of("10%") == share_of(" 0.1 ") == 0.1


def test_the_size_names_whose_episodes_they_are() -> None:
    """New episodes of both versions together, and the number of the canary's among them."""
    text = size_of({"needed": 12_340, "share": 0.1, "effect": 0.031})
    assert text.startswith("a verdict takes about 12,340 new episodes, 1,234 of them the canary's")
    assert "differ by 0.031, a tenth of the recent mean" in text
    assert "too few episodes to estimate" in size_of({"needed": None})
