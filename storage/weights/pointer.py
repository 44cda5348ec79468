"""`live.json` and its copy: the live version, even if one of the two is damaged or lost.

    live.json         the live version; replaced atomically, under the lock of the store
    live.copy.json    the same, written afterwards

The copy is used if it has the highest generation that was given. If it is damaged too, or older (a
publication was interrupted), the latest version that collectors were to serve is taken, or else the
newest intact version. As it is unknown then whether a rollback had pinned the policy, the policy is
pinned: nothing is published until `headrace resume`.

Readers continue with the recovered version and log it once; `mend` writes both files again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from storage.errors import (
    GenerationConflict,
    ObjectChanged,
    WeightsDamaged,
    WeightsNotFound,
    WeightStoreError,
)
from storage.objects.interface import Status
from storage.weights.files import PolicyFiles
from storage.weights.folders import VersionFolders
from storage.weights.highest_numbers import HighestNumbers
from storage.weights.manifest import Live, Pin, open_document, seal_document
from storage.weights.served import ServedRecords

log = logging.getLogger("headrace.weights")

_FILE, _COPY = "live.json", "live.copy.json"


class PointerRead(NamedTuple):
    """The live version, what is wrong with live.json (None: nothing), and its bytes."""

    live: Live | None
    wrong: str | None = None
    data: bytes | None = None


class LivePointer:
    """The live pointer of one policy. Callers of `write` and `mend` hold the store's lock."""

    def __init__(
        self,
        files: PolicyFiles,
        versions: VersionFolders,
        numbers: HighestNumbers,
        served: ServedRecords,
    ) -> None:
        self._files = files
        self._names = files.name(_FILE), files.name(_COPY)
        self._versions, self._numbers, self._served = versions, numbers, served
        self._last_warning = ""

    def read(self) -> Live | None:
        """The live version, None before the first one. Logs a line if it had to be recovered."""
        return self.look().live

    def look(self) -> PointerRead:
        """Read the live version; recover it if live.json is damaged or lost."""
        wrong = None
        for _ in range(2):  # a first publication may happen between both reads
            try:
                return self._read(_FILE)
            except WeightsDamaged as error:
                wrong = str(error)
            except WeightsNotFound as error:
                if self._status(_COPY) is None:
                    return PointerRead(None)
                wrong = str(error)
        live = self._recovered()
        text = f"{wrong}; continuing with version {live.version}, generation {live.generation}"
        if live.pinned is not None:
            text += f", pinned by {live.pinned.by} ({live.pinned.why})"
        if text != self._last_warning:
            log.warning("%s", text)
        self._last_warning = text
        return PointerRead(live, wrong)

    def stamp(self) -> Hashable:
        """A value that changes with live.json; costs one `stat`."""
        for name in self._names:
            try:
                status = self._files.objects.status(name)
            except OSError:
                continue
            if status is not None:
                return status.stamp
        return None

    def copy_damage(self) -> str | None:
        """Why the copy cannot be read; None if it can, or there is none."""
        try:
            self._read(_COPY)
        except WeightsNotFound:
            return None
        except WeightsDamaged as error:
            return str(error)
        return None

    def in_order(self) -> bool:
        """Whether both files can be read and have the same content."""
        with contextlib.suppress(WeightsDamaged, WeightsNotFound):
            return self._read(_FILE).live == self._read(_COPY).live
        return self._status(_FILE) is None and self._status(_COPY) is None

    def mend(self) -> None:
        """Write both files again, unless they are in order."""
        found = self.look()
        if found.live is not None and not self.in_order():
            self._numbers.note(0, found.live.generation)  # a recovered one may be new
            self.write(found.live, found)

    def write(self, live: Live, before: PointerRead) -> None:
        """Replace the live version, durably, unless another writer did so since `before` was read.

        Raises GenerationConflict, WeightStoreError.
        """
        data = seal_document("live", live.to_json())
        name = self._files.name(_FILE)
        try:
            if before.wrong is None:
                self._files.objects.replace_if_unchanged(name, data, before.data)
            else:  # what is damaged has no content to compare
                self._files.objects.replace(name, data)
        except ObjectChanged as error:
            raise GenerationConflict(
                f"{self._files.policy_id}: another version became live meanwhile"
            ) from error
        except OSError as error:
            raise WeightStoreError(f"{self._files}: cannot write: {error}") from error
        try:
            self._files.objects.replace(self._files.name(_COPY), data)
        except OSError as error:  # the version is live nevertheless
            log.warning("%s is not up to date: %s", self._files.where(_COPY), error)

    def _recovered(self) -> Live:
        """The live version if live.json does not say it."""
        given = self._numbers.read().generation
        known = []
        with contextlib.suppress(WeightsDamaged, WeightsNotFound):
            copy = self._read(_COPY).live
            if copy is not None and copy.generation >= given:
                return copy
            known += [copy] if copy is not None else []
        known += [
            Live(generation=one.wanted_generation, version=one.wanted_version)
            for one in self._served.read()
            if one.wanted_version > 0
        ]
        whole = self._versions.whole()
        latest = max(known, key=lambda live: live.generation, default=None)
        if latest is None or latest.version not in whole:
            newest = max([*whole] or self._versions.numbers(), default=1)
            latest = Live(generation=0, version=newest)
        if latest.generation < given:
            latest = replace(latest, generation=given + 1)
        why = "live.json was damaged, so it is unknown whether a rollback had pinned the policy"
        status = self._status(_FILE)
        pin = Pin(by="headrace", when=0 if status is None else status.written, why=why)
        return Live(generation=latest.generation, version=latest.version, pinned=pin)

    def _status(self, name: str) -> Status | None:
        return self._files.objects.status(self._files.name(name))

    def _read(self, name: str) -> PointerRead:
        """Read a pointer. Raises WeightsNotFound, WeightsDamaged, OSError."""
        where, data = self._files.where(name), self._files.document_bytes("live", name)
        return PointerRead(Live.from_json(open_document("live", data, where), where), data=data)
