"""Documents of a later release are refused by name, with what to do, and stay as they are.

Of `storage.system.formats`: whoever reads such a document as damaged would replace it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ingest.access.key_files import load_tokens
from ingest.access.tokens import TokenError
from ingest.delivery.spool import SpoolSegment
from ingest.delivery.spool_frames import HEAD, framed
from policy.data.freeze import load_frozen
from policy.data.run_once import once
from storage.declarations.declaration import DeclarationError
from storage.declarations.dropped_steps import read_dropped
from storage.declarations.held_policies import held_version
from storage.declarations.policy_files import load_declarations
from storage.errors import NewerFormat
from storage.reading.shard_reader import read_position
from storage.system.formats import require_format
from storage.weights.decisions import load_decisions
from tests.upgrade.fixture import unpacked

Read = Callable[[Path, Path], Any]
MANIFEST = "manifests/" + 16 * "[0-9a-f]" + ".json"


def record_of(root: Path, path: Path) -> Any:
    """Do a job once, whose record is at `path`."""
    frozen = load_frozen(next(root.glob(MANIFEST)))
    return once(frozen, "job", {}, lambda: {"done": True})


DOCUMENTS: dict[str, tuple[str, Read]] = {
    "policies/late.json": ("version", lambda root, _: load_declarations(root)),
    "keys/tokens.json": ("version", lambda root, _: load_tokens(root)),
    "readers/shuffled.json": ("version", lambda root, _: read_position(root, "shuffled")),
    "decisions/pinned/*.json": ("format", lambda root, _: load_decisions(root, "pinned")),
    "dropped/*.json": ("format", lambda root, path: read_dropped(root, path.stem)),
    "flow/held.json": ("format", lambda root, _: held_version(root, "held")),
    MANIFEST: ("format", lambda _, path: load_frozen(path)),
    "manifests/*.job-*.json": ("format", record_of),
}


@pytest.mark.parametrize("pattern", DOCUMENTS)
def test_a_document_of_a_later_release_is_refused_by_name(tmp_path: Path, pattern: str) -> None:
    """The release's own document is read; with a later number it is named and left alone."""
    unpacked(tmp_path, "root")
    root, (key, read) = tmp_path / "root", DOCUMENTS[pattern]
    record_of(root, root)
    path = next(iter(root.glob(pattern)))
    read(root, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: 2}))
    before = path.read_bytes()
    with pytest.raises((NewerFormat, TokenError, DeclarationError)) as caught:
        read(root, path)
    assert f"{path}: {key}: expected 1, got 2: a later release" in str(caught.value)
    assert path.read_bytes() == before


def test_a_spool_of_a_later_release_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its events stay for a later release, and the warning names the folder."""
    unpacked(tmp_path, "root")
    (segment,) = (tmp_path / "spool").glob("segment-*")
    head = msgspec.msgpack.encode(["", None, 0, [], [], 2])
    piece = segment / "00000000"
    piece.write_bytes(2 * framed(HEAD, head, 0, 0) + piece.read_bytes())
    before = piece.read_bytes()
    assert SpoolSegment.take_up(segment, 1_000, False) is None
    assert f"{segment}: format: expected 1, got 2: a later release" in caplog.text
    assert piece.read_bytes() == before


def test_a_number_that_no_build_gives_is_damage() -> None:
    """Readers treat a ValueError as damage, and a later number as what it is."""
    require_format({}, 1, "here")
    require_format({"format": 1}, 2, "here")
    for number in (0, -1, 1.0, True, "1", None):
        with pytest.raises(ValueError, match="here: format: expected 1, got"):
            require_format({"format": number}, 1, "here")
