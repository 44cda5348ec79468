"""The implementations keep the promises of `storage.objects.interface`, and breaks are found.

Also of `storage.objects.memory`, `storage.objects.opening` and `storage.conformance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from storage.conformance import ConformanceError
from storage.errors import ObjectNotFound
from storage.objects.conformance import ObjectsConformance
from storage.objects.interface import ObjectContent, Objects
from storage.objects.memory import MemoryObjects
from storage.objects.opening import objects_at


class TestFolderObjects(ObjectsConformance):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "root"

    def objects(self) -> Objects:
        return objects_at(self.folder)


class TestMemoryObjects(ObjectsConformance):
    def objects(self) -> Objects:
        return objects_at(MemoryObjects())


# --- broken implementations, each by the check that finds it --------------------------------------


class Unordered(MemoryObjects):
    def names(self, prefix: str = "", start_after: str = "") -> list[str]:
        return super().names(prefix, start_after)[::-1]


class Overwriting(MemoryObjects):
    def put_if_absent(self, name: str, content: ObjectContent | Mapping[str, bytes]) -> None:
        if isinstance(content, bytes):
            return self.replace(name, content)
        return super().put_if_absent(name, content)


class Piecewise(MemoryObjects):
    """Writes the objects of a group one by one."""

    def put_if_absent(self, name: str, content: ObjectContent | Mapping[str, bytes]) -> None:
        if not isinstance(content, Mapping):
            return super().put_if_absent(name, content)
        for one, data in content.items():
            super().put_if_absent(f"{name}/{one}", data)
        return None


class LastWriterWins(MemoryObjects):
    def replace_if_unchanged(self, name: str, content: bytes, before: bytes | None) -> None:
        self.replace(name, content)


class Unlimited(MemoryObjects):
    def read(self, name: str, **given: Any) -> bytes:
        return super().read(name, **{**given, "limit": 2**40})


class Trusting(MemoryObjects):
    """Refuses no name where it only reads."""

    def read(self, name: str, **given: Any) -> bytes:
        try:
            return super().read(name, **given)
        except ValueError as error:
            raise ObjectNotFound(name) from error


class Deaf(MemoryObjects):
    def delete(self, name: str) -> None:
        if not self._group(name):
            super().delete(name)


class Unchanging(MemoryObjects):
    def status(self, name: str) -> Any:
        found = super().status(name)
        return found and found._replace(stamp=0)


class Copying(MemoryObjects):
    """Leaves a local file where it was."""

    def put_if_absent(self, name: str, content: ObjectContent | Mapping[str, bytes]) -> None:
        super().put_if_absent(name, content.read_bytes() if isinstance(content, Path) else content)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Unordered, "names_are_listed_in_order_and_one_level_at_a_time"),
        (Overwriting, "a_name_is_taken_once"),
        (Overwriting, "of_many_writers_one_takes_a_name"),
        (Piecewise, "a_name_is_taken_once"),
        (LastWriterWins, "an_object_is_replaced_if_it_is_unchanged"),
        (Unlimited, "an_object_is_read_whole_and_by_range"),
        (Trusting, "no_name_leads_out_of_the_store"),
        (Deaf, "what_is_deleted_is_gone"),
        (Unchanging, "a_status_changes_with_the_object"),
        (Copying, "a_local_file_is_taken_over"),
    ],
)
def test_the_suite_finds_what_is_broken(broken: type[MemoryObjects], check: str) -> None:
    class Suite(ObjectsConformance):
        def objects(self) -> Objects:
            return broken()

    with pytest.raises(ConformanceError):
        getattr(Suite(), f"test_{check}")()
