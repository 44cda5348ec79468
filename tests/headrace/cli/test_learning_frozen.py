"""`freeze` and `--manifest` as a scheduler runs them, each command twice; and HEADRACE_PARENT."""

import json
import os

import numpy as np
import pytest

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.episode import Part
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id
from tests.headrace.command import answer as one_line
from tests.headrace.command import headrace, process

SPACES = Box((1,)), Discrete(2)


def answer(*words):
    result = headrace(*words, "--json")
    assert result.returncode == 0, result.stderr
    return one_line(result)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """400 decisions: the sign of the observation says which action earns."""
    folder, schema = tmp_path_factory.mktemp("root"), schema_id(*SPACES)
    save_declaration(folder, PolicyDeclaration(observation=SPACES[0], action=SPACES[1]))
    rng = np.random.default_rng(0)
    parts = []
    for i in range(400):
        seen, action = np.float32(rng.normal()), int(rng.integers(2))
        parts.append(
            Part(
                episode_id=f"e{i}",
                part=0,
                t0=0,
                steps=1,
                schema_id=schema,
                obs=Codec(SPACES[0]).encode(np.array([seen])),
                actions=Codec(SPACES[1]).encode(action),
                rewards=np.float64(action == (seen > 0)).tobytes(),
                action_logp=np.float64(np.log(0.5)).tobytes(),
                policy_version=np.int64(-1).tobytes(),
                source=b"\1",
                pass_prob=np.float64(1).tobytes(),
                ts=np.int64(i).tobytes(),
                received_ts=np.int64(i).tobytes(),
                ended="terminated",
                ordinal=i,
                episode_ordinal=i,
            )
        )
    writer = ShardWriter(folder / "shards")
    writer.write(f"0123456789ab-{schema}", canonical_json(*SPACES), parts)
    return folder


def test_each_command_on_a_manifest_has_its_effect_once(root):
    """freeze, train, evaluate, publish: the second answer equals the first, marked unchanged."""
    own = ("--root", root)
    first, again = (answer("freeze", *own) for _ in range(2))
    assert (first["rows"], first["unchanged"], again["unchanged"]) == (400, False, True)
    manifest = ("--manifest", first["manifest"])
    digest = ""
    for words in (
        ("train",),
        ("evaluate",),
        ("publish", "--min-ess", 5, "--reward-range", 0, 1),
    ):
        answers = [answer(*words, *([digest] if digest else []), *own, *manifest) for _ in range(2)]
        for one in answers:
            one.get("served", {}).pop("seconds", None)  # how long each looked
        assert answers[1] == answers[0] | {"unchanged": True}
        assert (answers[0]["unchanged"], answers[0]["manifest"]) == (False, first["hash"])
        digest = digest or answers[0]["candidate"]
    assert answers[0]["published"]
    assert len(answer("versions", *own)["versions"]) == 1


def test_a_refusal_can_have_a_status_of_its_own(root):
    """Status 4 both times if the episodes cannot tell; a separate status for a worse candidate."""
    own = ("--root", root)
    manifest = ("--manifest", answer("freeze", *own)["manifest"])
    digest = answer("train", *own, *manifest, "--epochs", 3)["candidate"]
    words = ("publish", digest, *own, *manifest, "--min-ess", "1e9", "--json")
    results = [headrace(*words, "--refused-exit", "99") for _ in range(2)]
    assert [one.returncode for one in results] == [4, 4]
    documents = [json.loads(one.stdout) for one in results]
    assert [one["unchanged"] for one in documents] == [False, True]
    assert not any(one["published"] for one in documents)
    assert [one["gate"]["verdict"] for one in documents] == ["cannot tell"] * 2


def test_people_read_the_same_in_words(root):
    """Without `--json` each command prints a sentence or a table, and no traceback."""
    frozen = headrace("freeze", "--root", root)
    assert "400 rows in 400 parts" in frozen.stdout
    manifest = next((root / "manifests").glob("????????????????.json"))
    digest = answer("train", "--root", root, "--manifest", manifest, "--epochs", 3)["candidate"]
    judged = headrace("evaluate", digest, "--root", root, "--manifest", manifest)
    assert "the logging policy" in judged.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "--manifest", "headrace.json"), "expected headrace.json, which does not exist"),
        (("evaluate", "abcdef", "--manifest", "m", "--plot", "p.png"), "neither --log nor --plot"),
    ],
)
def test_what_does_not_fit_is_told(words, expected, tmp_path):
    """Arguments that do not fit end a command with status 2 and one line."""
    (tmp_path / "shards").mkdir()
    result = headrace(*words, env={"HEADRACE_ROOT": str(tmp_path)})
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_whose_parent_is_gone_does_nothing(root):
    """HEADRACE_PARENT names the parent process; another parent means that the first one died."""
    words = ("versions", "--root", root, "--json")
    assert process(*words, env={"HEADRACE_PARENT": str(os.getpid())}).returncode == 0
    orphan = process(*words, env={"HEADRACE_PARENT": "1"})
    assert (orphan.returncode, orphan.stdout) == (1, "")
    assert "parent" in orphan.stderr
