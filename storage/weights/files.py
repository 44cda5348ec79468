"""The objects of one policy's weights, as documents and bytes of a bounded size."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from storage.declarations.declaration import check_policy_id
from storage.errors import (
    ObjectExists,
    ObjectNotFound,
    ObjectUnusable,
    WeightsDamaged,
    WeightsNotFound,
    WeightStoreError,
)
from storage.objects.opening import Root, objects_at
from storage.weights.manifest import Json, open_document, seal_document

_NUMBER = re.compile("[1-9][0-9]{0,17}")
MAX_DOCUMENT = 256 * 2**20
"""The largest size in bytes of a manifest or a lineage."""
MAX_POINTER = 2**20
"""The largest size in bytes of a document that collectors read repeatedly. All threads of the
process wait while one is parsed: parsing 114 MB took 8 seconds."""
_POINTERS = frozenset({"live", "store", "numbers", "served", "fence", "off_chain"})
MAX_WEIGHTS = 16 * 2**30
"""The largest size in bytes of a file of weights."""


class PolicyFiles:
    """The objects of one policy: those of `weights/{policy_id}`, by their names in it, and numbers.

    Methods raise WeightsNotFound, WeightsDamaged for what is no object or too long, and OSError.
    """

    def __init__(self, root: Root, policy_id: str) -> None:
        self.policy_id = check_policy_id(policy_id)
        self.objects = objects_at(root)
        self.folder = f"weights/{policy_id}"

    def __str__(self) -> str:
        return f"{self.objects}/{self.folder}"

    def name(self, name: str) -> str:
        """The name of an object in the whole store; `numbers/` is next to `weights/`."""
        return name if name.startswith("numbers/") else f"{self.folder}/{name}"

    def where(self, name: str) -> str:
        """An object, for messages."""
        return f"{self.objects}/{self.name(name)}"

    def exist(self) -> bool:
        """Whether the policy has a folder: something was ever stored."""
        return self.objects.status(self.folder) is not None

    def names(self, folder: str) -> list[str]:
        """The entries of a folder, sorted: objects and groups."""
        prefix = f"{self.name(folder)}/"
        found = self.objects.names(prefix)
        return sorted(name.removeprefix(prefix).removesuffix("/") for name in found)

    def read(self, name: str, limit: int = MAX_WEIGHTS) -> bytes:
        """The bytes of an object of at most `limit` bytes."""
        try:
            return self.objects.read(self.name(name), limit=limit)
        except ObjectNotFound as error:
            raise WeightsNotFound(str(error)) from error
        except ObjectUnusable as error:
            raise WeightsDamaged(str(error)) from error

    def document(self, kind: str, name: str) -> dict[str, Json]:
        """The body of a document."""
        return open_document(kind, self.document_bytes(kind, name), self.where(name))

    def document_bytes(self, kind: str, name: str) -> bytes:
        """The bytes of a document of one kind."""
        return self.read(name, MAX_POINTER if kind in _POINTERS else MAX_DOCUMENT)

    def write(self, kind: str, name: str, body: Json, *, durable: bool = True) -> None:
        """Replace a document."""
        self.objects.replace(self.name(name), seal_document(kind, body), durable=durable)

    def add(self, name: str, content: bytes | Mapping[str, bytes]) -> None:
        """Create an object, or an immutable folder of files.

        Raises ObjectExists if the name is taken, and WeightStoreError if it cannot be written.
        """
        try:
            self.objects.put_if_absent(self.name(name), content)
        except ObjectExists:
            raise
        except OSError as error:
            raise WeightStoreError(f"{self.where(name)} cannot be written: {error}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the store.

        Raises WeightStoreError, caused by a BlockingIOError, if another process does not release
        it. The text names that process, which may have been suspended while it published.
        """
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self.objects.exclusive(self.name("lock")))
            except BlockingIOError as error:
                raise WeightStoreError(f"{self.policy_id}: {error.strerror}") from error
            yield


def number_of(name: str) -> int | None:
    """The positive number that a name spells without leading zeros; None for other names."""
    return int(name) if _NUMBER.fullmatch(name) else None
