"""An address opens the store of its scheme; another store is one more line in a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.objects import opening
from storage.objects.conformance import ObjectsConformance
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.memory import MemoryObjects
from storage.objects.opening import local_folder, objects_at, require_local
from tests.storage.objects.sqlite_objects import SCHEME, SqliteObjects


class TestSqliteObjects(ObjectsConformance):
    """The suite holds for a store that is none of ours, opened by its address."""

    @pytest.fixture(autouse=True)
    def _in_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(opening.STORES, SCHEME, SqliteObjects)
        self.address = f"{SCHEME}://{tmp_path / 'objects.db'}"

    def objects(self) -> Objects:
        return objects_at(self.address)


def test_a_path_and_a_file_address_are_the_same_folder(tmp_path: Path) -> None:
    objects_at(tmp_path).replace("a", b"1")
    objects = objects_at(f"file://{tmp_path}")
    assert isinstance(objects, FolderObjects)
    assert objects.read("a") == b"1"
    assert local_folder(f"file://{tmp_path}") == tmp_path


def test_an_address_of_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    """The error names the schemes that there are; no folder of that name is made."""
    with pytest.raises(ValueError, match=r"expected a folder, or an address with file://; got 's3"):
        objects_at("s3://bucket/run")


def test_what_needs_a_local_folder_says_so() -> None:
    assert local_folder(MemoryObjects()) is None
    with pytest.raises(ValueError, match="the journal: expected a root in a local folder, got mem"):
        require_local(MemoryObjects(), "the journal")
