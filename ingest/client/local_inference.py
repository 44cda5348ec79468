"""The client's own copy of a policy, and how it stays fresh.

`LocalPolicy` fetches the live weights once, then keeps a long poll open in a background thread, so
that a newly published version is acted with a few milliseconds later. Weights are verified before
they are parsed; what does not verify, or is older than what is here, is refused and the last good
weights stay. A swap is one assignment: a step is acted with the old weights or with the new.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ingest.client.open_episodes import ClientEpisode
from ingest.client.transport import Answer, RetryDelays, Transport
from ingest.protocol.errors import CollectorUnavailable, Refusal
from ingest.protocol.weights import Published, no_version, not_finite, other_spaces
from policy.inference.numpy_policy import Action, NotFinite, NumpyPolicy
from storage.errors import StorageError
from storage.experience.hashed import is_canary
from storage.weights.manifest import Manifest

log = logging.getLogger("headrace.client")
_decode_published = msgspec.msgpack.Decoder(Published).decode

LONG_POLL_SECONDS = 25.0
ASK_SECONDS = 0.1  # between questions of a client that is held and has no long poll


class LocalPolicy:
    """One policy as this client acts with it.

    `update_interval` is the longest, in seconds, that the client goes without asking: None asks
    only in `refresh`. With `long_poll` a thread asks all the time. Once weights are here no action
    waits for newer ones, but with 0: then each asks first, and waits for the answer.
    """

    def __init__(
        self,
        transport: Transport,
        policy_id: str,
        update_interval: float | None,
        *,
        long_poll: bool = True,
    ) -> None:
        self.policy_id = policy_id
        self._transport = transport
        self._interval = update_interval
        self._long_poll = long_poll and update_interval is not None
        self._path = f"/v1/policies/{policy_id}/weights"
        self._local = threading.local()
        self._changed = threading.Condition()
        self._refreshing = threading.RLock()  # a signal handler may act in the middle of a call
        self._reset()
        _policies.add(self)

    def _reset(self) -> None:
        self.current: NumpyPolicy | None = None
        self._canary: tuple[NumpyPolicy, float] | None = None  # and its share of the episodes
        self.refused = 0  # published weights that could not be taken up
        self.refused_older = 0  # those that come before what is here: of a restored backup
        self._store_id = ""
        self._generation = -1
        self._etag: str | None = None
        self._asked = float("-inf")
        self._thread: threading.Thread | None = None
        self._looking: threading.Thread | None = None
        self._failed: tuple[float, str] | None = None  # when the latest question did, and why
        self._closed = False

    def _reset_lock(self) -> None:
        """A forked child has no poll thread, and locks that nobody holds."""
        self._changed = threading.Condition()
        self._refreshing = threading.RLock()
        self._thread = self._looking = None
        self._local = threading.local()

    @property
    def version(self) -> int:
        """The version that is acted with, -1 for none."""
        policy = self.current
        return -1 if policy is None else policy.version

    @property
    def asks(self) -> bool:
        """Whether the next action would wait for an answer of the collector's."""
        return self.current is None or self._interval == 0

    def act(
        self, observation: Any, episode: ClientEpisode | None = None, *, asks: bool = True
    ) -> tuple[Action, int]:
        """An action and the version that chose it: the canary's, in its share of the episodes.
        Without `asks` what is here acts.

        Raises Refusal: `no_version`, also where the version is of other spaces than the episode,
        and `invalid` for an observation that overflows.
        """
        policy = self.current
        if policy is None or self._thread is None or self._interval == 0:
            self.ensure(waits=asks)
            policy = self.current
        if policy is None:
            raise no_version(self.policy_id)
        if episode is not None:
            policy = self._assigned(policy, episode)
            if policy.spec.schema_id != episode.policy.schema_id:
                raise other_spaces(self.policy_id)
        rng = getattr(self._local, "rng", None)
        if rng is None:
            rng = self._local.rng = np.random.default_rng()
        try:
            try:
                return policy.act_one(observation, rng), policy.version
            except RuntimeWarning:  # numpy's of an overflow, in a program where warnings are errors
                with np.errstate(over="ignore", invalid="ignore"):
                    return policy.act_one(observation, rng), policy.version
        except NotFinite as error:
            raise not_finite(self.policy_id, policy.version) from error

    def _assigned(self, live: NumpyPolicy, episode: ClientEpisode) -> NumpyPolicy:
        """What acts in an episode. Its first action assigns it, as its start did at the collector;
        it goes on with what is live when the canary has ended."""
        canary = self._canary
        if episode.arm is None:
            chosen = canary is not None and is_canary(self.policy_id, episode.episode_id, canary[1])
            episode.arm = canary[0].version if chosen and canary else live.version
        return canary[0] if canary is not None and canary[0].version == episode.arm else live

    def ensure(self, *, waits: bool = True) -> None:
        """Fetch what no action can do without, if it `waits`; have a thread look for the rest."""
        if waits and self.asks:
            self.refresh(required=self.current is None)
        if self._interval is None or self._closed:
            return
        if self._long_poll:
            with self._changed:
                if self._thread is None:
                    self._thread = _thread(self._poll)
                    self._thread.start()
        elif 0 < self._interval <= time.monotonic() - self._asked:
            with self._changed:
                if self._looking is None or not self._looking.is_alive():
                    self._looking = _thread(self._look)
                    self._looking.start()

    def _look(self) -> None:
        try:
            self.refresh(required=False)
        except Refusal as error:
            log.debug("policy %s: %s", self.policy_id, error)

    def refresh(self, *, required: bool = True) -> int | None:
        """Ask for newer weights now; answers the version acted with from here on.

        Raises CollectorUnavailable when `required` and the collector does not answer. What has
        failed while a caller waited for its turn is not repeated for it.
        """
        begin = time.monotonic()
        with self._refreshing:
            self._asked = time.monotonic()
            try:
                self._refresh(begin)
            except CollectorUnavailable:
                if required:
                    raise
            except Refusal as refusal:
                if refusal.code != "no_version":
                    raise
        policy = self.current
        return None if policy is None else policy.version

    def _refresh(self, begin: float) -> None:
        if self._failed is not None and self._failed[0] >= begin:
            raise CollectorUnavailable(self._failed[1])
        try:
            self._take(self._ask(None))
        except CollectorUnavailable as error:
            self._failed = time.monotonic(), str(error)
            raise

    def wait_newer(self, version: int, timeout: float) -> bool:
        """Wait until a version other than `version` is here; False when it does not come."""
        if self._long_poll:
            with self._changed:
                return self._changed.wait_for(lambda: self.version != version, timeout)
        deadline = time.monotonic() + timeout
        while self._interval is not None and self.version == version and not self._closed:
            self.refresh(required=False)
            left = deadline - time.monotonic()
            if self.version != version or left <= 0:
                break
            if self._transport.closing.wait(min(ASK_SECONDS, left)):
                break
        return self.version != version

    def close(self) -> None:
        """Stop polling; the thread ends with its current request at the latest."""
        self._closed = True

    def _ask(self, wait: float | None) -> Answer:
        headers: dict[str, str] = {}
        if self._etag is not None:
            headers["if-none-match"] = self._etag
        if wait is not None:
            headers["prefer"] = f"wait={wait:.0f}"
        timeout = self._transport.timeout + (wait or 0.0)
        return self._transport.attempt("GET", self._path, None, headers, timeout)

    def _poll(self) -> None:
        backoff, failures = RetryDelays(), 0
        while not self._closed and threading.current_thread() is self._thread:
            try:
                refused = self.refused
                self._take(self._ask(LONG_POLL_SECONDS))
                failures = 0 if self.refused == refused else failures + 1
                if failures and self._transport.closing.wait(backoff.delay(failures)):
                    return  # what cannot be taken up comes again at once: not so fast
            except (CollectorUnavailable, Refusal) as error:
                failures += 1
                if self._transport.closing.wait(backoff.delay(failures)):
                    return
                log.debug("policy %s: %s", self.policy_id, error)

    def _take(self, answer: Answer) -> None:
        """Take up an answer's weights, if they are newer and whole."""
        self._asked = time.monotonic()
        if answer.status == 304:
            return
        try:
            published = _decode_published(answer.body)
            manifest = Manifest.from_json(published.manifest)
            same = manifest.store_id == self._store_id
            if same and published.generation <= self._generation:
                self._etag = answer.headers.get("etag", self._etag)
                if published.generation < self._generation:
                    self._refuse_older(manifest.version, published.generation)
                return
            policy = NumpyPolicy.published(manifest, published.weights)
            canary = _canary(published)
        except (StorageError, ValueError, msgspec.DecodeError) as error:
            self.refused += 1
            log.warning("policy %s: refused published weights: %s", self.policy_id, error)
            return
        except Exception:  # the last good ones stay, and the poll goes on
            self.refused += 1
            log.exception("policy %s: refused published weights", self.policy_id)
            return
        with self._changed:
            if manifest.store_id == self._store_id and published.generation <= self._generation:
                return  # another thread took up a newer one meanwhile
            self._etag = answer.headers.get("etag", self._etag)
            self._store_id, self._generation = manifest.store_id, published.generation
            self.current, self._canary = policy, canary
            self._changed.notify_all()

    def _refuse_older(self, version: int, generation: int) -> None:
        """Say that the collector offers what comes before the weights that are here."""
        self.refused_older += 1
        log.warning(
            "policy %s: refused version %d of generation %d, because version %d of generation %d "
            "is in use: the collector's weights were restored from a backup; the next version that "
            "is published is used",
            self.policy_id,
            version,
            generation,
            self.version,
            self._generation,
        )


def _thread(target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name="headrace-weights", daemon=True)


def _canary(published: Published) -> tuple[NumpyPolicy, float] | None:
    """What acts in a share of the episodes, verified. Raises what keeps it from acting."""
    found = published.canary
    if found is None:
        return None
    return NumpyPolicy.published(Manifest.from_json(found.manifest), found.weights), found.share


_policies: weakref.WeakSet[LocalPolicy] = weakref.WeakSet()


def _after_fork() -> None:
    for policy in list(_policies):
        policy._reset_lock()


if hasattr(os, "register_at_fork"):  # a client also runs on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)
