"""A job gives up on unreadable shards after --retry-for, and names the files."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from tests.headrace.command import process, refused
from tests.storage.reading.test_shard_reader import ACTION, OBS, part, write

SOURCE = Path(__file__).parents[2] / "storage" / "reading" / "failing_opens.c"


@pytest.fixture
def failing(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose opens can fail."""
    library = tmp_path / "failing_opens.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library), "FAILING_OPENS": str(tmp_path / "failing")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    save_declaration(root, PolicyDeclaration(observation=OBS, action=ACTION))
    return root


def test_freeze_gives_up_and_names_the_file(root: Path, failing: dict[str, str]) -> None:
    """An unreadable shard is an error: it is not silently omitted from the manifest."""
    write(root, [part(0, 2)])
    path = write(root, [part(1, 2)]).path
    Path(failing["FAILING_OPENS"]).write_text(f"{errno.EIO}\n{path.name}")
    words = ["freeze", "--root", root, "--retry-for", 0.3]
    texts = (str(path), os.strerror(errno.EIO), "gave up after 0.3 s")
    assert refused(process(*words, env=failing), *texts)
    assert not list(root.glob("manifests/*.json"))
