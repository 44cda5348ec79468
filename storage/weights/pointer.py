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
import os
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from storage.errors import WeightsDamaged, WeightsNotFound, WeightStoreError
from storage.system.files import replace_file
from storage.weights.files import read_document
from storage.weights.highest_numbers import HighestNumbers
from storage.weights.manifest import Live, Pin, seal_document
from storage.weights.served import ServedRecords
from storage.weights.versions import VersionFolders

__all__ = ["LivePointer"]

log = logging.getLogger("headrace.weights")


class LivePointer:
    """The live pointer of one policy. Callers of `write` and `mend` hold the store's lock."""

    def __init__(
        self,
        directory: Path,
        versions: VersionFolders,
        numbers: HighestNumbers,
        served: ServedRecords,
    ) -> None:
        self._file, self._copy = directory / "live.json", directory / "live.copy.json"
        self._versions, self._numbers, self._served = versions, numbers, served
        self._last_warning = ""

    def read(self) -> Live | None:
        """The live version, None before the first one. Logs a line if it had to be recovered."""
        return self.look()[0]

    def look(self) -> tuple[Live | None, str | None]:
        """Return (the live version, what is wrong with live.json); None for nothing."""
        wrong = None
        for _ in range(2):  # a first publication may happen between both reads
            try:
                return _read(self._file), None
            except WeightsDamaged as error:
                wrong = str(error)
            except WeightsNotFound as error:
                if not os.path.lexists(self._copy):
                    return None, None
                wrong = str(error)
        live = self._recovered()
        text = f"{wrong}; continuing with version {live.version}, generation {live.generation}"
        if live.pinned is not None:
            text += f", pinned by {live.pinned.by} ({live.pinned.why})"
        if text != self._last_warning:
            log.warning("%s", text)
        self._last_warning = text
        return live, wrong

    def stamp(self) -> Hashable:
        """A value that changes with live.json; costs one `stat`."""
        for path in (self._file, self._copy):
            with contextlib.suppress(OSError):
                status = os.stat(path)  # a copied file may keep its modification time or its inode
                return status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return None

    def copy_damage(self) -> str | None:
        """Why the copy cannot be read; None if it can, or there is none."""
        try:
            _read(self._copy)
        except WeightsNotFound:
            return None
        except WeightsDamaged as error:
            return str(error)
        return None

    def in_order(self) -> bool:
        """Whether both files can be read and have the same content."""
        with contextlib.suppress(WeightsDamaged, WeightsNotFound):
            return _read(self._file) == _read(self._copy)
        return not os.path.lexists(self._file) and not os.path.lexists(self._copy)

    def mend(self) -> None:
        """Write both files again, unless they are in order."""
        live = self.read()
        if live is not None and not self.in_order():
            self._numbers.note(0, live.generation)  # a recovered generation may be a new one
            self.write(live)

    def write(self, live: Live) -> None:
        """Replace the live version, durably. Raises WeightStoreError."""
        data = seal_document("live", live.to_json())
        try:
            replace_file(self._file, data)
        except OSError as error:
            raise WeightStoreError(f"{self._file.parent}: cannot write: {error}") from error
        try:
            replace_file(self._copy, data)
        except OSError as error:  # the version is live nevertheless
            log.warning("%s is not up to date: %s", self._copy, error)

    def _recovered(self) -> Live:
        """The live version if live.json does not say it."""
        given = self._numbers.read().generation
        known = []
        with contextlib.suppress(WeightsDamaged, WeightsNotFound):
            copy = _read(self._copy)
            if copy.generation >= given:
                return copy
            known.append(copy)
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
        try:
            when = os.stat(self._file).st_mtime_ns // 1000
        except OSError:
            when = 0
        pin = Pin(by="headrace", when=when, why=why)
        return Live(generation=latest.generation, version=latest.version, pinned=pin)


def _read(path: Path) -> Live:
    """Read a pointer. Raises WeightsNotFound, WeightsDamaged, OSError."""
    return Live.from_json(read_document("live", path), path)
