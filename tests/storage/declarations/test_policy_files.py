"""The files under `policies/`: reading returns what was saved."""

import os

import pytest

from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.spaces.descriptors import Box, Discrete


def test_a_root_may_be_text(tmp_path):
    """A root may be given as text or as a Path, as for stores and readers."""
    declared = PolicyDeclaration(observation=Box((4,)), action=Discrete(2))
    save_declaration(str(tmp_path), declared)
    assert load_declarations(str(tmp_path)) == load_declarations(tmp_path) == {"default": declared}


def test_a_pipe_in_the_place_of_a_policy_is_told(tmp_path):
    """Reading a FIFO does not wait for a writer."""
    save_declaration(tmp_path, PolicyDeclaration(observation=Box((4,)), action=Discrete(2)))
    os.mkfifo(tmp_path / "policies" / "odd.json")
    with pytest.raises(DeclarationError, match=r"odd\.json: expected a regular file"):
        load_declarations(tmp_path)
