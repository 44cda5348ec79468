"""What every implementation of `Objects` has to pass.

    class TestMyObjects(ObjectsConformance):
        def objects(self) -> Objects:
            return MyObjects(...)

Whether a write survives a loss of power cannot be checked from within a process.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from storage.conformance import expect, expect_error
from storage.errors import ObjectChanged, ObjectExists, ObjectNotFound, ObjectUnusable
from storage.objects.interface import Objects

WRITERS = 4
ROUNDS = 25
TWO = (b"a" * 100_000, b"b" * 100_000)


class ObjectsConformance:
    """Checks of the promises of `Objects`; each raises ConformanceError. Override `objects`."""

    def objects(self) -> Objects:
        """A new and empty store."""
        raise NotImplementedError

    def test_names_are_listed_in_order_and_one_level_at_a_time(self) -> None:
        """`names` gives objects, and prefixes for what is below; from an offset if one is given."""
        store = self.objects()
        expect("a store without the prefix lists nothing", store.names("a/"), [])
        for name in ("b", "a/2", "a/10", "a/c/x", "a/c/y", "ab"):
            store.put_if_absent(name, b"1")
        expect("the top is listed", store.names(), ["a/", "ab", "b"])
        expect("a level is listed", store.names("a/"), ["a/10", "a/2", "a/c/"])
        expect("a prefix may end within a name", store.names("a/1"), ["a/10"])
        expect("a listing goes on after a name", store.names("a/", "a/10"), ["a/2", "a/c/"])
        expect("nothing comes after the last", store.names("a/", "a/c/"), [])
        expect("one object has no level below", store.names("b/"), [])

    def test_an_object_is_read_whole_and_by_range(self) -> None:
        """A range past the end is shorter; a limit bounds what is read."""
        store = self.objects()
        store.replace("a/b", b"0123456789")
        expect("all is read", store.read("a/b"), b"0123456789")
        expect("a range is read", store.read("a/b", begin=2, end=5), b"234")
        expect("a range may be open", store.read("a/b", begin=8), b"89")
        expect("a range ends with the object", store.read("a/b", begin=8, end=99), b"89")
        expect("nothing is past the end", store.read("a/b", begin=20, end=30), b"")
        expect("a range may be within a limit", store.read("a/b", end=4, limit=4), b"0123")
        text = "more than the limit is refused"
        expect_error(text, ObjectUnusable, lambda: store.read("a/b", limit=9))
        expect_error("a group is no object", ObjectUnusable, lambda: store.read("a"))
        for name in ("a/c", "none", "a/b/c"):
            text = f"{name} does not exist"
            expect_error(text, ObjectNotFound, partial(store.read, name))
            expect_error(text, FileNotFoundError, partial(store.read, name))

    def test_a_name_is_taken_once(self) -> None:
        """`put_if_absent` changes nothing where an object or a group is."""
        store = self.objects()
        store.put_if_absent("a", b"1")
        expect_error("a name is taken", ObjectExists, lambda: store.put_if_absent("a", b"2"))
        expect("what was there stays", store.read("a"), b"1")
        store.put_if_absent("g", {"x": b"1", "y": b"2"})
        for again in ({"x": b"3"}, {"z": b"3"}, b"3"):
            text = "a group is taken"
            expect_error(text, ObjectExists, partial(store.put_if_absent, "g", again))
        text = "a group does not replace an object"
        expect_error(text, ObjectExists, lambda: store.put_if_absent("a", {"x": b"3"}))
        expect("the group stays as it was", store.names("g/"), ["g/x", "g/y"])
        expect("and its content", store.read("g/x"), b"1")

    def test_of_many_writers_one_takes_a_name(self) -> None:
        """All the others get ObjectExists, of objects and of groups."""
        store = self.objects()
        won: list[str] = []

        def claim(writer: int) -> None:
            for number in range(ROUNDS):
                for name, content in ((f"a/{number}", b"1"), (f"g/{number}", {"x": b"1"})):
                    with suppress(ObjectExists):
                        store.put_if_absent(name, content)
                        won.append(name)

        _together(claim)
        expect("each name was given once", len(won), 2 * ROUNDS)
        expect("none was given twice", len(set(won)), 2 * ROUNDS)

    def test_a_local_file_is_taken_over(self) -> None:
        """Its bytes are the object's, and the file is gone; a refused one stays."""
        store = self.objects()
        with tempfile.TemporaryDirectory() as folder:
            for name, write in (("a", store.put_if_absent), ("b/c", store.replace)):
                file = Path(folder) / "file"
                file.write_bytes(b"content")
                store.replace("b/d", b"")
                _moved(write, name, file)
                expect("the object has the file's bytes", store.read(name), b"content")
                expect("the file is the store's", file.exists(), wanted=False)
            file.write_bytes(b"other")
            text = "a taken name refuses a file"
            expect_error(text, ObjectExists, lambda: store.put_if_absent("a", file))
            expect("the refused file stays", file.exists())

    def test_a_replaced_object_is_seen_whole(self) -> None:
        """Readers get the old or the new content while writers replace it."""
        store = self.objects()
        store.replace("a/b", TWO[0])
        over = threading.Event()
        seen: set[bytes] = set()

        def read() -> None:
            while not over.is_set():
                seen.add(store.read("a/b"))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(ROUNDS):
            store.replace("a/b", TWO[number % 2], durable=number % 3 == 0)
        over.set()
        reader.join()
        expect("a reader sees one content or the other", seen <= set(TWO))

    def test_a_group_is_seen_whole(self) -> None:
        """A reader that finds an object of a group finds them all, also while groups are made."""
        store = self.objects()
        over = threading.Event()
        torn: list[str] = []

        def read() -> None:
            while not over.is_set():
                torn.extend(name for name in store.names("g/") if len(store.names(name)) != 2)

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(ROUNDS):
            store.put_if_absent(f"g/{number}", {"x": b"1", "y": b"2"})
        over.set()
        reader.join()
        expect("no group is seen in part", torn, [])

    def test_an_object_is_replaced_if_it_is_unchanged(self) -> None:
        """Other content, none where some was expected, or some where none was, is ObjectChanged."""
        store = self.objects()
        replace = store.replace_if_unchanged
        text = "an absent object has not the content"
        expect_error(text, ObjectChanged, lambda: replace("a/b", b"1", b"0"))
        replace("a/b", b"1", None)
        expect_error("it is not absent", ObjectChanged, lambda: replace("a/b", b"2", None))
        expect_error("it has changed", ObjectChanged, lambda: replace("a/b", b"2", b"0"))
        expect("a refused replacement changes nothing", store.read("a/b"), b"1")
        replace("a/b", b"2", b"1")
        expect("an expected one does", store.read("a/b"), b"2")

    def test_no_replacement_is_lost(self) -> None:
        """Writers that count in one object count together, with and without the lock."""
        store = self.objects()
        store.replace("a/count", b"0")
        store.replace("a/locked", b"0")

        def count(writer: int) -> None:
            for _ in range(ROUNDS):
                while True:
                    before = store.read("a/count")
                    with suppress(ObjectChanged):
                        after = str(int(before) + 1).encode()
                        store.replace_if_unchanged("a/count", after, before)
                        break
                with store.exclusive("a/lock"):
                    before = store.read("a/locked")
                    after = str(int(before) + 1).encode()
                    store.replace_if_unchanged("a/locked", after, before)

        _together(count)
        wanted = str(WRITERS * ROUNDS).encode()
        expect("each replacement counts", store.read("a/count"), wanted)
        expect("the lock excludes others", store.read("a/locked"), wanted)

    def test_bytes_are_appended(self) -> None:
        """To what is there, or to nothing."""
        store = self.objects()
        store.append("a/b", b"1")
        store.append("a/b", b"23")
        expect("all that was appended is there", store.read("a/b"), b"123")

    def test_a_staged_file_becomes_an_object(self) -> None:
        """`staging` gives a path that is no name of an object, and is not listed."""
        store = self.objects()
        file = store.staging("a/b")
        file.write_bytes(b"content")
        expect("a staged file is not listed", store.names("a/"), [])
        store.replace("a/bc", file)
        store.settle("a/bc")
        expect("it has become the object", store.read("a/bc"), b"content")
        expect("and is gone", file.exists(), wanted=False)

    def test_a_part_of_a_store_has_its_own_names(self) -> None:
        """What is written in one is read in the other."""
        store = self.objects()
        part = store.under("a").under("b")
        part.put_if_absent("c", b"1")
        part.put_if_absent("g", {"x": b"2"})
        store.replace("a/b/d", b"3")
        expect("the names are those below", part.names(), ["c", "d", "g/"])
        expect("a part may go on after a name", part.names("", "c"), ["d", "g/"])
        expect("a level of a part is listed", part.names("g/"), ["g/x"])
        expect("the store has the whole names", store.read("a/b/g/x"), b"2")
        expect("a part reads what the store wrote", part.read("d"), b"3")
        expect_error("a part has no other objects", ObjectNotFound, lambda: part.read("a/b/c"))
        part.delete("c")
        expect("what a part deletes is gone", store.names("a/b/"), ["a/b/d", "a/b/g/"])
        with part.exclusive("lock"):
            part.replace_if_unchanged("d", b"4", b"3")

    def test_a_status_changes_with_the_object(self) -> None:
        """And is None where nothing is; a group has one, too."""
        store = self.objects()
        expect("nothing has no status", store.status("a/b"), None)
        store.replace("a/b", b"1")
        before = store.status("a/b")
        expect("a status has the size", before and before.size, 1)
        expect("an object is one", before and before.is_object)
        expect("and stays with the object", store.status("a/b"), before)
        store.replace("a/b", b"2")
        after = store.status("a/b")
        expect("another object has another stamp", before and after and before[0] != after[0])
        store.put_if_absent("g/x", {"x": b"1"})
        group = store.status("g/x")
        expect("a group has a status", group and group.is_object, wanted=False)

    def test_what_is_deleted_is_gone(self) -> None:
        """An object, or a whole group; deleting nothing is no error; the name is free again."""
        store = self.objects()
        store.put_if_absent("a", b"1")
        store.put_if_absent("g/1", {"x": b"1", "y": b"2"})
        store.put_if_absent("g/11", b"1")
        for name in ("a", "g/1", "g/1", "none/none"):
            store.delete(name)
        expect("nothing else is gone", (store.names(), store.names("g/")), (["g/"], ["g/11"]))
        store.put_if_absent("a", b"2")
        store.put_if_absent("g/1", {"z": b"3"})
        expect("the new one is there", (store.read("a"), store.names("g/1/")), (b"2", ["g/1/z"]))

    def test_no_name_leads_out_of_the_store(self) -> None:
        """Nor to unfinished files: every call refuses such a name."""
        store = self.objects()
        for name in ("", "/a", "a/", "a//b", "..", "../a", "a/../b", ".", ".a", "a/.b", "a\0b"):
            for call in _calls(store, name):
                expect_error(f"{name!r} is no name", ValueError, call)
        text = "a group has no name in another folder"
        expect_error(text, ValueError, lambda: store.put_if_absent("g", {"../x": b"1"}))
        expect("nothing is there", store.names(), [])


def _calls(store: Objects, name: str) -> list[Callable[[], object]]:
    return [
        lambda: store.read(name),
        lambda: store.status(name),
        lambda: store.put_if_absent(name, b"1"),
        lambda: store.replace(name, b"1"),
        lambda: store.replace_if_unchanged(name, b"1", None),
        lambda: store.append(name, b"1"),
        lambda: store.delete(name),
        lambda: store.exclusive(name).__enter__(),
    ]


def _moved(write: Callable[[str, Path], None], name: str, file: Path) -> None:
    write(name, file)


def _together(job: Callable[[int], None]) -> None:
    """Run a job on several threads at once; raise the error of one of them."""
    errors: list[BaseException] = []

    def run(writer: int) -> None:
        try:
            job(writer)
        except BaseException as error:  # raised by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
