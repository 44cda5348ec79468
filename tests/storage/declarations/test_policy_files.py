"""The files under `policies/`: what was saved is what is read."""

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.spaces.descriptors import Box, Discrete


def test_a_root_may_be_text(tmp_path):
    """As for the stores and readers of a root."""
    declared = PolicyDeclaration(observation=Box((4,)), action=Discrete(2))
    save_declaration(str(tmp_path), declared)
    assert load_declarations(str(tmp_path)) == load_declarations(tmp_path) == {"default": declared}
