"""The files under `policies/`: declarations, each written atomically, and read all together."""

from __future__ import annotations

import json
from pathlib import Path

from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.system.files import NotRegular, make_directory, read_regular, replace_file


def save_declaration(root: Path | str, declaration: PolicyDeclaration) -> Path:
    """Write `policies/{id}.json` atomically and durably, and return its path."""
    folder = Path(root) / "policies"
    make_directory(folder)
    path = folder / f"{declaration.policy_id}.json"
    replace_file(path, (json.dumps(declaration.to_json(), indent=2) + "\n").encode())
    return path


def read_declaration(path: Path) -> PolicyDeclaration:
    """Read the declaration in a file or a pipe.

    Raises DeclarationError, which names file and field, and OSError.
    """
    return _declaration_of(path, path.read_bytes())


def _declaration_of(path: Path, content: bytes) -> PolicyDeclaration:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DeclarationError(f"{path}: expected JSON: {error}") from error
    return PolicyDeclaration.from_json(document, str(path))


def load_declarations(root: Path | str) -> dict[str, PolicyDeclaration]:
    """Read all policies declared under `root`: id -> declaration, sorted by id.

    Raises DeclarationError, OSError.
    """
    found: dict[str, PolicyDeclaration] = {}
    for path in sorted((Path(root) / "policies").glob("*.json")):
        try:
            declaration = _declaration_of(path, read_regular(path))
        except NotRegular as error:
            raise DeclarationError(str(error)) from error
        if declaration.policy_id != path.stem:
            raise DeclarationError(
                f"{path}: expected policy_id {path.stem!r}, got {declaration.policy_id!r}"
            )
        found[declaration.policy_id] = declaration
    return found
