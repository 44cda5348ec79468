"""The files under `policies/`: declarations, each written atomically, and read all together."""

from __future__ import annotations

import json
from pathlib import Path

from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.redaction_rules import leaf_rules
from storage.errors import ObjectUnusable
from storage.objects.opening import Root, objects_at
from storage.spaces.action_mask import ACTION_MASK, ActionMask
from storage.spaces.candidates import Candidates
from storage.spaces.descriptors import SpaceError


def save_declaration(root: Root, declaration: PolicyDeclaration) -> Path:
    """Write `policies/{id}.json` atomically and durably, and return its path.

    Raises DeclarationError for an action mask, or candidates, that do not fit the action space, and
    for redaction of the mask.
    """
    try:
        mask = ActionMask.of(declaration.observation, declaration.action)
        redacted = leaf_rules(declaration.redact, declaration.observation)
        if mask is not None and mask.leaf.path in [leaf.path for leaf, _ in redacted]:
            raise SpaceError(
                f"redact: expected no rule for obs.{ACTION_MASK}, without which decisions can "
                "neither be learned from nor judged"
            )
        Candidates.of(declaration.observation, declaration.action)
    except SpaceError as error:
        raise DeclarationError(f"policy {declaration.policy_id}: {error}") from error
    objects, name = objects_at(root), f"policies/{declaration.policy_id}.json"
    objects.replace(name, (json.dumps(declaration.to_json(), indent=2) + "\n").encode())
    return Path(f"{objects}/{name}")


def read_declaration(path: Path) -> PolicyDeclaration:
    """Read the declaration in a file or a pipe.

    Raises DeclarationError, which names file and field, and OSError.
    """
    return _declaration_of(path, path.read_bytes())


def _declaration_of(where: Path | str, content: bytes) -> PolicyDeclaration:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DeclarationError(f"{where}: expected JSON: {error}") from error
    return PolicyDeclaration.from_json(document, str(where))


def load_declarations(root: Root) -> dict[str, PolicyDeclaration]:
    """Read all policies declared under `root`: id -> declaration, sorted by id.

    Raises DeclarationError, OSError.
    """
    found: dict[str, PolicyDeclaration] = {}
    objects = objects_at(root)
    for name in objects.names("policies/"):
        stem, dot, ending = name.removeprefix("policies/").rpartition(".")
        if f"{dot}{ending.removesuffix('/')}" != ".json":
            continue
        where = f"{objects}/{name}"
        try:
            declaration = _declaration_of(where, objects.read(name.removesuffix("/")))
        except ObjectUnusable as error:
            raise DeclarationError(str(error)) from error
        if declaration.policy_id != stem:
            raise DeclarationError(
                f"{where}: expected policy_id {stem!r}, got {declaration.policy_id!r}"
            )
        found[declaration.policy_id] = declaration
    return found
