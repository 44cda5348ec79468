"""What the command line says of a replay: its tags, and the spaces that its columns need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ingest.replay.replay import ReplayOptions, infer_spaces
from ingest.server.declare import declare
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import DEFAULT_POLICY


def tag_columns(words: Sequence[str]) -> dict[str, str]:
    """tag -> column, of words NAME=COLUMN. Raises ValueError."""
    pairs = [word.partition("=") for word in words]
    for word, (name, _, column) in zip(words, pairs, strict=True):
        if not name or not column:
            raise ValueError(f"--tag: expected NAME=COLUMN, got {word!r}")
    return {name: column for name, _, column in pairs}


def declare_columns(root: Path, options: ReplayOptions) -> PolicyDeclaration:
    """Declare the spaces that a file's columns need, for a collector to be started on `root`."""
    observation, action = infer_spaces(options)
    declared = PolicyDeclaration(
        observation=observation, action=action, policy_id=options.policy_id or DEFAULT_POLICY
    )
    for change in declare(root, declared, spaces_only=True):
        print(change, file=sys.stderr)
    return declared
