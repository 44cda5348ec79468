"""`headrace token`: create, list, revoke; and use by `import`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingest.access.key_files import load_tokens
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.headrace.command import answer, headrace, refused


def test_a_token_is_shown_once_and_its_life_is_told(tmp_path: Path) -> None:
    """stdout holds the token alone; the list and the audit lines never do."""
    limits = ("--expires", "90d", "--rate", "500", "--open-episodes", "50")
    scopes = ("--scope", "log", "--scope", "weights:read")
    made = headrace("token", "create", "web", *scopes, *limits, "--root", tmp_path)
    text = made.stdout.strip()
    assert text.startswith("hr_")
    token_id, secret = text.split("_", 2)[1:]
    assert f'"audit":"token_created","id":"{token_id}","name":"web"' in made.stderr
    assert secret not in made.stderr
    assert "from now on every request to its collector needs one" in made.stderr
    other = headrace("token", "create", "other", "--scope", "log", "--root", tmp_path)
    assert "from now on" not in other.stderr
    headrace("token", "revoke", "other", "--root", tmp_path)
    table = headrace("token", "list", "--root", tmp_path)
    assert "log, weights:read" in table.stdout
    assert secret not in table.stdout + table.stderr
    one, _ = answer(headrace("token", "list", "--root", tmp_path, "--json"))["tokens"]
    assert one["expires"] - one["created"] == 90 * 86400
    assert (one["state"], one["rate"], one["open_episodes"]) == ("live", 500.0, 50)
    assert "sha256" not in one
    gone = headrace("token", "revoke", "web", "--root", tmp_path)
    assert f"Revoked web ({token_id})" in gone.stdout
    assert '"audit":"token_revoked"' in gone.stderr
    one, _ = answer(headrace("token", "list", "--root", tmp_path, "--json"))["tokens"]
    assert one["state"] == "revoked"


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("create", "web", "--scope", "root"), ("expected scopes among log, act", "got root")),
        (("create", "a b", "--scope", "log"), ("token name: expected",)),
        (("create", "web", "--scope", "log", "--expires", "soon"), ("--expires: expected",)),
        (("create", "web", "--scope", "log", "--rate", "0"), ("rate: expected > 0",)),
        (("revoke", "nobody"), ("there are no tokens",)),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, words: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    (tmp_path / "policies").mkdir()
    assert refused(headrace("token", *words, "--root", tmp_path), *texts)
    assert load_tokens(tmp_path) == []


def test_an_import_sends_its_token_by_the_environment(tmp_path: Path) -> None:
    """Without a token the import fails with the text of the 401; with one every row arrives."""
    declare(tmp_path / "root", "box:1", "discrete:2")
    made = headrace("token", "create", "import", "--scope", "log", "--root", tmp_path / "root")
    token = made.stdout.strip()
    log = tmp_path / "log.csv"
    log.write_text("x,a,r\n0.5,1,1.0\n0.25,0,2.0\n")
    with CollectorProcess(tmp_path / "root") as process:
        words = ["import", log, "--observation", "x", "--action", "a", "--reward", "r"]
        words += ["--address", process.address, "--json"]
        assert refused(headrace(*words), "expected a token")
        done = headrace(*words, env={"HEADRACE_TOKEN": token})
        assert json.loads(done.stdout)["steps"] == 2, done.stderr
        assert token not in done.stdout + done.stderr
        process.settle(2, authorization=f"Bearer {token}")
        process.stop()
    assert [row["rewards"] for row in shard_rows(tmp_path / "root")] == [1.0, 2.0]
