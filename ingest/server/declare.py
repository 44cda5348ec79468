"""The declarations of `collect`: short forms of spaces, an environment, or a policy file.

declared = declaration_of(Declaring(observation="box:4", action="discrete:2"))
for change in declare(root, declared):
    print(change)
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ingest.server.options import Declaring, DeclaringSpaces
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import load_declarations, read_declaration, save_declaration
from storage.spaces.descriptors import Space, SpaceError, parse_space


def declaration_of(given: DeclaringSpaces) -> PolicyDeclaration | None:
    """The declaration of one of the forms; None if none is given.

    Raises DeclarationError for several forms, half of one, an unknown environment, or no such file;
    SpaceError; OSError for a file that cannot be read.
    """
    observation, action, env = given.observation, given.action, given.env
    file = given.policy if isinstance(given, Declaring) else None
    forms = [(observation, action) != (None, None), env is not None, file is not None]
    if sum(forms) > 1:
        raise DeclarationError("expected one of --observation with --action, --env and --policy")
    if file is not None:
        return _of_file(file)
    if env is not None:
        return _of_environment(env)
    if observation is not None and action is not None:
        spaces = _space("--observation", observation), _space("--action", action)
        return PolicyDeclaration(observation=spaces[0], action=spaces[1])
    if forms[0]:
        raise DeclarationError("expected --observation and --action together, got one of them")
    return None


def _space(option: str, text: str) -> Space:
    try:
        return parse_space(text)
    except SpaceError as error:
        raise SpaceError(f"{option}: {error}") from error


def _of_file(path: Path) -> PolicyDeclaration:
    try:
        return read_declaration(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        text = f"--policy: expected a policy file, got {path}: {error.strerror}"
        raise DeclarationError(text) from error


def _of_environment(name: str) -> PolicyDeclaration:
    try:
        import gymnasium  # noqa: PLC0415  the [train] extra: only this form needs it
    except ModuleNotFoundError as error:
        raise DeclarationError(
            "--env needs gymnasium, which is not installed: pip install 'headrace[train]', or give "
            "--observation and --action"
        ) from error

    from storage.spaces.gymnasium_spaces import from_gym  # noqa: PLC0415  imports gymnasium

    try:
        made = gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise DeclarationError(f"environment {name!r}: {error}") from error
    try:
        return PolicyDeclaration(
            observation=from_gym(made.observation_space), action=from_gym(made.action_space)
        )
    finally:
        made.close()


def only_declaration(root: Path) -> PolicyDeclaration:
    """The only policy declared under `root`; raises DeclarationError for none or several."""
    found = load_declarations(root)
    if len(found) != 1:
        raise DeclarationError(
            f"--reward-window, --reward-range: expected one policy under {root / 'policies'}, or "
            f"--policy FILE, got {', '.join(found) or 'none'}"
        )
    return next(iter(found.values()))


def declare(
    root: Path,
    declared: PolicyDeclaration,
    *,
    spaces_only: bool = False,
    reward_window: float | None = None,
    reward_range: tuple[float, float] | None = None,
    redeclare: bool = False,
) -> tuple[str, ...]:
    """Write the declaration under `root`; return the changes as texts for people.

    `spaces_only` keeps all other settings that are declared already; `reward_window` and
    `reward_range` override both. Raises DeclarationError, also for spaces other than the root's
    unless `redeclare`, because later rows then belong to another stream.
    """
    before = load_declarations(root).get(declared.policy_id)
    if before is not None and before.schema_id != declared.schema_id and not redeclare:
        raise DeclarationError(
            f"policy {declared.policy_id} of {root}: expected the spaces that it is declared with, "
            f"{_spaces(before)}; got {_spaces(declared)}. Use another --root, or --redeclare: new "
            "episodes then have the new spaces, and readers do not mix them with the old"
        )
    if spaces_only:
        declared = keeping_settings(before, declared)
    if reward_window is not None:
        declared = replace(declared, reward_window=reward_window)
    if reward_range is not None:
        declared = replace(declared, reward_range=reward_range)
    new = declared.to_json()
    old = new if before is None else before.to_json()
    if before is None or new != old:
        save_declaration(root, declared)
    kept = "; episodes that are open keep the old"
    return tuple(
        f"policy {declared.policy_id}: {name} was {json.dumps(old.get(name))}, is now "
        f"{json.dumps(new.get(name))}{'' if name == 'reward_range' else kept}"
        for name in sorted({*new, *old})
        if new.get(name) != old.get(name)
    )


def _spaces(declared: PolicyDeclaration) -> str:
    spaces = declared.observation, declared.action
    return "observation {} and action {}".format(*(f"{space!r:.200}" for space in spaces))


def keeping_settings(
    before: PolicyDeclaration | None, declared: PolicyDeclaration
) -> PolicyDeclaration:
    """The spaces of `declared`, with the settings that were declared before, if any."""
    if before is None:
        return declared
    same = before.schema_id == declared.schema_id
    return replace(
        before,
        observation=declared.observation,
        action=declared.action,
        # a spec is valid only for its own spaces
        spec=(before.spec if same else None) or declared.spec,
        candidate_features=declared.candidate_features
        or (before.candidate_features if same else ()),
    )
