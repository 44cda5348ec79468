"""`Objects`: named bytes at rest, and what each call promises.

    weights/default/live.json                 an object
    weights/default/versions/7/               a group: its objects appear and disappear together

Names are relative, with "/" between their components. No component is empty or begins with a dot,
so no name leads out of the store, and none is that of an unfinished file.

**Visibility.** A reader sees an object whole, or not at all; of a replaced one it sees the old or
the new content. The same holds for the objects of a group.

**Durability.** When a call that writes returns, content and name survive a loss of power, unless
`durable=False` was given. If it raises an error, they may or may not be there.

**Writers.** `put_if_absent` and `replace_if_unchanged` hold between all writers, also on several
machines. `exclusive` holds at least between the threads and processes of one machine.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

MAX_OBJECT = 2**28
"""Bytes that `read` accepts without another limit."""
ObjectContent: TypeAlias = bytes | Path
"""Bytes, or a local file of these bytes: it is synced, and belongs to the store from then on."""


class Status(NamedTuple):
    """What is known of an object, or of a group, without reading it."""

    stamp: Hashable
    """Another one whenever the object was replaced."""
    written: int
    """When it was written, in microseconds since the epoch, by the clock of the store."""
    size: int
    is_object: bool
    """False for a group, and for anything else that is not read."""


@runtime_checkable
class Objects(Protocol):
    """A store of objects. Thread-safe. `str(objects)` is its address (`storage.objects.opening`).

    Each method raises ValueError for a name that is none, and OSError if the store does not answer
    or refuses. The errors named below are of `storage.errors`.
    """

    def names(self, prefix: str = "", start_after: str = "") -> list[str]:
        """The names that begin with `prefix`, up to the next "/", in order; none is no error.

        A name that ends with "/" stands for all names that begin with it, such as a group. Only
        names after `start_after` are listed.
        """

    def read(
        self, name: str, *, begin: int = 0, end: int | None = None, limit: int = MAX_OBJECT
    ) -> bytes:
        """The bytes of an object from `begin` until before `end`: fewer if it is shorter.

        Never waits for a writer. Raises ObjectNotFound, and ObjectUnusable if the name is that of
        something else, or the bytes are more than `limit`.
        """

    def status(self, name: str) -> Status | None:
        """The status of an object or a group; None if there is neither."""

    def under(self, folder: str) -> Objects:
        """The objects whose names begin with `folder/`, by the rest of their names."""

    def staging(self, name: str) -> Path:
        """A path for a local file that is to become an object, which needs no copy from there.

        `name` begins like the object's own name. Only this process uses the path.
        """

    def settle(self, name: str) -> None:
        """Make durable what another writer left, who may have been killed before its end."""

    def put_if_absent(self, name: str, content: ObjectContent | Mapping[str, bytes]) -> None:
        """Create an object, or a group from the name of each object within it to its content.

        Raises ObjectExists, also if another writer was first; then nothing has changed.
        """

    def replace(self, name: str, content: ObjectContent, *, durable: bool = True) -> None:
        """Create or replace an object.

        `durable=False` saves the time of a sync: after a loss of power the object may be missing or
        damaged.
        """

    def replace_if_unchanged(self, name: str, content: bytes, before: bytes | None) -> None:
        """Replace an object whose content is `before`; None: create it.

        Raises ObjectChanged if it has other content; then nothing has changed.
        """

    def append(self, name: str, content: bytes) -> None:
        """Add bytes to the end of an object, or create it. Only one writer at a time may do this.

        A loss of power or a crash may leave a part of `content`. If something else has the name, it
        is set aside first.
        """

    def delete(self, name: str) -> None:
        """Delete an object or a group; no error if there is none. It need not be durable."""

    def exclusive(self, name: str) -> AbstractContextManager[object]:
        """Exclude other holders of the lock with this name; not reentrant.

        Raises BlockingIOError, which names the holder, if another one does not release it.
        """


_NAME = re.compile(r"(?:[^/.\0][^/\0]*/)*[^/.\0][^/\0]*")


def check_name(name: str) -> str:
    """Return a valid name; else raise ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            "name: expected a relative one whose components are not empty and do not begin with a "
            f"dot, got {name!r:.200}"
        )
    return name
