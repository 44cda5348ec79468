"""The lease of a follower: only its holder may train and publish a policy automatically.

    weights/{policy_id}/leases/{fence}.json

The file with the highest number is the lease. Its number is the *fence*: each publication of a
follower carries it, and the store refuses any but the highest (`require_fence`). So a trainer that
was suspended until its lease expired cannot publish when it resumes. The holder renews the record
regularly and reports its state in it. The next number can be taken once the record has expired or
was released, or its process on this machine is dead.

The highest number is also stored outside `weights/` (`storage.weights.highest_numbers`), so it
still rises after `leases/` was lost or restored from a backup. A holder writes a lost record again,
and stops when it finds another lease with its number.

A number is claimed by putting a record where there is none, which one of several writers can do,
also on several hosts. Each record has one writer. On one host, the lock of the store also makes
claims and publications exclude each other.

Only followers need the lease: people publish, promote and roll back without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from storage.errors import (
    LeaseHeld,
    ObjectExists,
    WeightsDamaged,
    WeightsNotFound,
    WeightStoreError,
)
from storage.weights.files import PolicyFiles, number_of
from storage.weights.highest_numbers import HighestFence
from storage.weights.manifest import seal_document

log = logging.getLogger("headrace.trainer")

LEASE_SECONDS = 15.0
LEASES = "leases"
_NUMBER = (int, float)
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "fence": int,
    "host": str,
    "pid": int,
    "machine": str,
    "started": str,
    "taken": _NUMBER,
    "expires": _NUMBER,
    "status": dict,
}
"""The fields of a record."""
_ASK_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """The holder of a lease. Times are seconds since the epoch by the holder's clock.

    `machine` and `started` (clock ticks since boot) distinguish a process from a later one with the
    same id. `status` is the holder's report, plain JSON.
    """

    fence: int
    host: str
    pid: int
    machine: str
    started: str
    taken: float
    expires: float
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """The host and process of the holder, for messages."""
        taken = datetime.fromtimestamp(self.taken, UTC).isoformat(timespec="seconds")
        return f"process {self.pid} on {self.host} (lease {self.fence}, taken {taken})"

    def held(self, now: float) -> bool:
        """Whether the holder may still train: its record is fresh, and its process is not dead."""
        return now < self.expires and not self._died()

    def _died(self) -> bool:
        """Whether the holder was a process of this machine that has ended."""
        return self.machine == _machine() and _started(self.pid) != self.started

    @classmethod
    def read(cls, files: PolicyFiles, fence: int) -> Self:
        """Read a record. Raises WeightsDamaged, WeightsNotFound, OSError."""
        body = files.document("lease", _name(fence))
        wrong = [name for name, kind in _TYPES.items() if not isinstance(body.get(name), kind)]
        if wrong or set(body) != set(_TYPES):
            where = files.where(_name(fence))
            raise WeightsDamaged(f"{where}: expected a lease, got {body!r:.200}")
        return cls(**body)

    def is_of(self, other: LeaseRecord) -> bool:
        """Whether both records are of the same lease, not of two leases with the same number."""
        names = ("fence", "host", "pid", "machine", "started", "taken")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def to_bytes(self) -> bytes:
        return seal_document("lease", {**vars(self), "status": dict(self.status)})


class Lease:
    """A lease that this process took; a thread renews it until `release`.

    `check` raises LeaseHeld once the lease is lost; `report` sets the status in its record.
    """

    def __init__(self, files: PolicyFiles, record: LeaseRecord, seconds: float) -> None:
        self._files = files
        self._record = record
        self._seconds = seconds
        self._report: Mapping[str, Any] = {}
        self._lost: LeaseHeld | None = None
        self._failing = False
        self._wake, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="headrace-lease", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        files: PolicyFiles,
        *,
        wait: float = 0.0,
        seconds: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Lease:
        """Take the lease of a policy for `seconds` at a time.

        Waits for at most `wait` seconds, or until `stop()` returns True, for the holder to end.
        Raises LeaseHeld, which names the holder, and OSError if the record cannot be written.
        """
        seconds = LEASE_SECONDS if seconds is None else seconds
        deadline, warned = time.monotonic() + wait, False
        while True:
            try:
                return cls(files, _claim(files, seconds), seconds)
            except LeaseHeld as held:
                if time.monotonic() >= deadline or stop():
                    raise
                if not warned:
                    log.warning("%s; waiting up to %.0f s for it", held, wait)
                warned = True
            threading.Event().wait(_ASK_SECONDS)

    @property
    def fence(self) -> int:
        """The lease's number, which publications carry."""
        return self._record.fence

    def check(self) -> None:
        """Raise LeaseHeld if another follower has taken over."""
        if self._lost is not None:
            raise self._lost

    def report(self, status: Mapping[str, Any]) -> None:
        """Set the status that the record contains from its next renewal on."""
        self._report = dict(status)

    def renew(self) -> None:
        """Write the record again, unless another follower has taken over. Raises OSError."""
        try:
            require_fence(self._files, self.fence)
            expires = time.time() + self._seconds
            self._record = replace(self._record, expires=expires, status=self._report)
            _renew(self._files, self._record)
        except LeaseHeld as lost:
            self._lost = lost

    def release(self) -> None:
        """End the lease, so that the next follower can take over at once.

        The number is not used again.
        """
        self._over = True
        self._wake.set()
        self._thread.join()
        if self._lost is None:
            self._seconds = -1.0
            with contextlib.suppress(OSError):  # otherwise the lease expires
                self.renew()

    def _run(self) -> None:
        while not self._wake.wait(self._seconds / 5) and self._lost is None:
            try:
                self.renew()
                self._failing = False
            except Exception as error:  # any error: without this thread the lease expires
                if not self._failing:  # log only the first of consecutive failures
                    log.warning("lease %d cannot be renewed; trying again: %s", self.fence, error)
                self._failing = True


def current_lease(files: PolicyFiles) -> LeaseRecord | None:
    """The record with the highest number, held or not; None before the first one.

    Raises WeightsDamaged.
    """
    for _ in range(3):  # a new holder may remove the record meanwhile
        numbers = _numbers(files)
        if not numbers:
            return None
        with contextlib.suppress(WeightsNotFound):
            return LeaseRecord.read(files, max(numbers))
    return None


def require_fence(files: PolicyFiles, fence: int) -> None:
    """Raise LeaseHeld if a lease has, or had, a higher number than `fence`."""
    newest = max([*_numbers(files), HighestFence(files).read()])
    if newest <= fence:
        return
    with contextlib.suppress(OSError, WeightsDamaged, WeightsNotFound):
        other = LeaseRecord.read(files, newest)
        raise LeaseHeld(
            f"{files.policy_id}: lease {fence} is over: {other.holder} has taken over the training"
        )
    raise LeaseHeld(f"{files.policy_id}: lease {fence} is over: lease {newest} was taken")


def _claim(files: PolicyFiles, seconds: float) -> LeaseRecord:
    """Take the next number and return its record. Raises LeaseHeld."""
    try:
        with files.locked():
            return _claim_locked(files, seconds)
    except WeightStoreError as error:
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        raise LeaseHeld(str(error)) from error


def _claim_locked(files: PolicyFiles, seconds: float) -> LeaseRecord:
    numbers = _numbers(files)
    now = time.time()
    require_free(files, now)
    memory = HighestFence(files)
    record = LeaseRecord(
        fence=max([*numbers, memory.read()]) + 1,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started=_started(os.getpid()),
        taken=now,
        expires=now + seconds,
    )
    memory.note(record.fence)  # before others can see the record
    _put(files, record)
    for number in numbers:
        with contextlib.suppress(OSError):  # a lower number does no harm
            files.objects.delete(files.name(_name(number)))
    return record


def _renew(files: PolicyFiles, record: LeaseRecord) -> None:
    """Replace or restore the record of a lease. Raises LeaseHeld if it is another lease's."""
    try:
        other = LeaseRecord.read(files, record.fence)
    except WeightsNotFound:  # `leases/` was lost or restored from a backup
        return _put(files, record)
    except WeightsDamaged:  # the record has this lease's number
        other = record
    if not other.is_of(record):
        raise LeaseHeld(
            f"{files.policy_id}: lease {record.fence} is over: {other.holder} has the same number, "
            "after a restore from a backup"
        )
    return files.objects.replace(files.name(_name(record.fence)), record.to_bytes())


def _put(files: PolicyFiles, record: LeaseRecord) -> None:
    """Claim a number. Raises LeaseHeld if it is taken."""
    try:
        files.objects.put_if_absent(files.name(_name(record.fence)), record.to_bytes())
    except ObjectExists as error:  # another host was first
        raise LeaseHeld(f"{files.policy_id}: lease {record.fence} was taken meanwhile") from error


def require_free(files: PolicyFiles, now: float) -> None:
    """Raise LeaseHeld, which names the holder, if the lease is held at `now` (s since the epoch).

    A damaged record counts as free: its holder can no longer publish once the next number is taken.
    """
    try:
        known = current_lease(files)
    except WeightsDamaged as error:
        log.warning("a lease that cannot be read is taken over: %s", error)
        return
    if known is not None and known.held(now):
        left = known.expires - now
        raise LeaseHeld(
            f"{files.policy_id}: {known.holder} trains this policy; its lease ends in {left:.0f} s "
            "unless it is renewed"
        )


def _numbers(files: PolicyFiles) -> list[int]:
    names = (name for name in files.names(LEASES) if name.endswith(".json"))
    found = (number_of(name.removesuffix(".json")) for name in names)
    return [number for number in found if number]


def _name(fence: int) -> str:
    return f"{LEASES}/{fence}.json"


def _machine() -> str:
    """A text that identifies this boot of this machine and this namespace of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux: leases end only by expiry
        return f"unknown {secrets.token_hex(6)}"


def _started(pid: int) -> str:
    """The start time of a process of this machine, in ticks since boot; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended
