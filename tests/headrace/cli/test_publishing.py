"""How `headrace versions` shows versions, candidates, and what is damaged or off the chain."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.cli.learning import _latest
from headrace.cli.publishing import pause, versions
from headrace.cli.serving import Expected, Where
from storage.weights.off_chain import mark_off_chain
from tests.storage.weights.any_weights import add, store_in


def test_versions_shows_what_is_off_the_chain_and_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version whose checkpoint is lost, and one that cannot be read: with the reason."""
    store = store_in(tmp_path)
    for value in (1.0, 2.0, 3.0):
        store.publish(add(store, value))
    mark_off_chain(store.files, 1, "its checkpoint is lost")
    manifest = store.directory / "versions" / "2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    waiting = add(store, 4.0)
    os.utime(store.directory / "candidates" / waiting, (2**32, 2**32))
    (store.directory / "candidates" / waiting / "candidate.json").write_text("{}")
    versions(where=Where(root=str(tmp_path)))
    shown = capsys.readouterr().out
    assert "Version 1 is off the chain: its checkpoint is lost" in shown
    assert "Version 2 cannot be read: " in shown
    assert f"Candidate {waiting[:12]}, the latest, cannot be read: " in shown
    assert "latest" not in shown.partition(f"Candidate {waiting[:12]}")[0]
    assert _latest(store) == waiting
    versions(where=Where(root=str(tmp_path)), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [one["off_chain"] for one in document["versions"]] == ["its checkpoint is lost", None]
    assert list(document["damaged"]) == ["2"]
    assert list(document["damaged_candidates"]) == [waiting]


def test_versions_of_a_root_without_any_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without versions the output says so: an empty table alone would look like a fault."""
    (store_in(tmp_path).directory).mkdir(parents=True, exist_ok=True)
    versions(where=Where(root=str(tmp_path)))
    assert capsys.readouterr().out.endswith("No version is live.\n")


def test_versions_says_when_candidates_were_made_and_which_is_the_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oldest first; `latest` is the one that `publish latest` takes, also once it is live."""
    store = store_in(tmp_path)
    found = [add(store, value) for value in (1.0, 2.0, 3.0)]
    for seconds, digest in zip((200, 300, 100), found, strict=True):
        os.utime(store.directory / "candidates" / digest, (seconds, seconds))

    def listed() -> list[str]:
        versions(where=Where(root=str(tmp_path)))
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if any(digest[:12] in line for digest in found)]

    oldest, older, latest = listed()
    assert "1970-01-01 00:01:40" in oldest
    assert "1970-01-01 00:03:20" in older
    assert "1970-01-01 00:05:00" in latest
    assert ["latest" in line for line in (oldest, older, latest)] == [False, False, True]
    store.publish(_latest(store))
    live, *waiting = listed()
    assert "wanted, latest" in live
    assert not any("latest" in line for line in waiting)
    versions(where=Where(root=str(tmp_path)), as_json=True)
    document = json.loads(capsys.readouterr().out)
    added = {one["digest"]: one["added"] for one in document["candidates"]}
    assert [added[digest] for digest in found] == [200_000_000, 300_000_000, 100_000_000]


def test_a_pause_keeps_an_earlier_pin_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output and the audit tell what is in `live.json`: the reason of the first pin."""
    store = store_in(tmp_path)
    store.publish(add(store, 1.0))
    pause("a slow release", tmp_path, expected=Expected())
    first = capsys.readouterr()
    assert first.out.endswith(": a slow release.\n")
    assert '"a slow release"' in first.err
    pause("a bad reward", tmp_path, expected=Expected())
    again = capsys.readouterr()
    assert again.out.startswith("default stays pinned, as before, by ")
    assert again.out.endswith(": a slow release. The reason 'a bad reward' is not recorded.\n")
    assert "paused" not in again.err
    pause("", tmp_path, expected=Expected(), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["pinned"]["why"], document["unchanged"]) == ("a slow release", True)
