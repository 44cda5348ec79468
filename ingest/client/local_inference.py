"""The client's own copy of a policy, and its updates.

`LocalPolicy` fetches the live weights once, then keeps a long poll open in a background thread, so
that a new version acts a few milliseconds after its publication. Weights are verified before they
are parsed; invalid or older ones are refused, and the current weights stay. They are replaced by
one assignment, so each step is acted with either the old or the new weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ingest.client.open_episodes import ClientEpisode
from ingest.delivery.transport import RETRY_DELAYS, Answer, Transport
from ingest.protocol.errors import CollectorUnavailable, Refusal
from ingest.protocol.weights import Published, no_version, not_finite, other_spaces
from policy.inference.distributions import NotFinite
from policy.inference.numpy_policy import Action, NumpyPolicy
from storage.errors import StorageError
from storage.experience.hashed import is_canary
from storage.system.forks import renewed_by_fork
from storage.weights.manifest import Manifest

log = logging.getLogger("headrace.client")
_decode_published = msgspec.msgpack.Decoder(Published).decode

LONG_POLL_SECONDS = 25.0
ASK_SECONDS = 0.1  # between requests of a held client without a long poll


class LocalPolicy:
    """One policy that this client acts with.

    `update_interval` is the maximum number of seconds between requests for newer weights; None:
    only `refresh` asks. With `long_poll` a thread always has a request open. Once there are
    weights, actions do not wait for newer ones, except with `update_interval=0`: then each action
    asks first and waits for the answer.
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
        self.current: NumpyPolicy | None = None
        self._canary: tuple[NumpyPolicy, float] | None = None  # with its share of the episodes
        self.refused = 0  # publications that could not be used
        self._unusable = ""  # why, of the latest one
        self.refused_older = 0  # older publications, as after a restored backup
        self._store_id = ""
        self._generation = -1
        self._etag: str | None = None
        self._asked = float("-inf")
        self._failed: tuple[float, str] | None = None  # when the latest request failed, and why
        self._closed = False
        self._renew()
        _policies.add(self)

    def _renew(self) -> None:
        """Make the locks, also in a forked child, which has no threads."""
        self._changed = threading.Condition()
        self._refreshing = threading.RLock()  # a signal handler may act in the middle of a call
        self._thread: threading.Thread | None = None
        self._looking: threading.Thread | None = None
        self._local = threading.local()

    @property
    def version(self) -> int:
        """The version in use; -1 if there is none."""
        policy = self.current
        return -1 if policy is None else policy.version

    def version_in(self, episode: ClientEpisode) -> int:
        """The version that acts in an episode, and assigns its arm; -1 without weights."""
        live = self.current
        return -1 if live is None else self._assigned(live, episode).version

    @property
    def asks(self) -> bool:
        """Whether the next action would wait for an answer of the collector."""
        return self.current is None or self._interval == 0

    def act(
        self, observation: Any, episode: ClientEpisode | None = None, *, asks: bool = True
    ) -> tuple[Action, int]:
        """An action and the version that chose it: the canary, in its share of the episodes.

        Without `asks` the current weights act, without a request for newer ones. Raises Refusal:
        `no_version`, also if the version has other spaces than the episode, and `invalid` for an
        observation that overflows.
        """
        policy = self.current
        if policy is None or self._thread is None or self._interval == 0:
            self.ensure(waits=asks)
            policy = self.current
        if policy is None:
            raise no_version(self.policy_id, self._unusable)
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
        """The policy that acts in an episode: the live version or the canary.

        The first action, or `version_in` before it, assigns the arm, as the start does at the
        collector. When the canary has ended, the live version acts.
        """
        canary = self._canary
        if episode.arm is None:
            chosen = canary is not None and is_canary(self.policy_id, episode.episode_id, canary[1])
            episode.arm = canary[0].version if chosen and canary else live.version
        return canary[0] if canary is not None and canary[0].version == episode.arm else live

    def ensure(self, *, waits: bool = True) -> None:
        """Fetch required weights now if it `waits`; otherwise a thread asks for newer ones.

        While there are no weights and the latest request got no answer, only that thread waits.
        Raises CollectorUnavailable.
        """
        failed: CollectorUnavailable | None = None
        if waits and self.asks:
            if self._failed is not None and self.current is None and self._interval:
                failed = CollectorUnavailable(self._failed[1])
            else:
                try:
                    self.refresh(required=self.current is None)
                except CollectorUnavailable as error:
                    failed = error
        self._ask_in_background()
        if failed is not None:
            raise failed

    def _ask_in_background(self) -> None:
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
        """Ask for newer weights now; return the version in use from now on.

        Raises CollectorUnavailable if `required` and the collector does not answer. A caller that
        waited for another caller's failed request does not repeat it.
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
        self._take(self._ask(None))

    def wait_newer(self, version: int, timeout: float) -> bool:
        """Wait until another version than `version` is in use; return False at the timeout."""
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
        """Stop polling; the thread ends after its current request."""
        self._closed = True

    def _ask(self, wait: float | None) -> Answer:
        headers: dict[str, str] = {}
        if self._etag is not None:
            headers["if-none-match"] = self._etag
        if wait is not None:
            headers["prefer"] = f"wait={wait:.0f}"
        timeout = self._transport.timeout + (wait or 0.0)
        try:
            answer = self._transport.attempt("GET", self._path, None, headers, timeout)
        except CollectorUnavailable as error:
            self._failed = time.monotonic(), str(error)
            raise
        except Refusal:
            self._failed = None
            raise
        self._failed = None
        return answer

    def _poll(self) -> None:
        failures = 0
        while not self._closed and threading.current_thread() is self._thread:
            try:
                refused = self.refused
                self._take(self._ask(LONG_POLL_SECONDS))
                failures = 0 if self.refused == refused else failures + 1
                if failures and self._transport.closing.wait(RETRY_DELAYS.delay(failures)):
                    return  # weights that cannot be used would come again at once
            except (CollectorUnavailable, Refusal) as error:
                failures += 1
                if self._transport.closing.wait(RETRY_DELAYS.delay(failures)):
                    return
                log.debug("policy %s: %s", self.policy_id, error)

    def _take(self, answer: Answer) -> None:
        """Use an answer's weights if they are newer and intact."""
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
            self._unusable = str(error)
            log.warning("policy %s: refused published weights: %s", self.policy_id, error)
            return
        except Exception:  # the current weights stay, and polling continues
            self.refused += 1
            log.exception("policy %s: refused published weights", self.policy_id)
            return
        with self._changed:
            if manifest.store_id == self._store_id and published.generation <= self._generation:
                return  # another thread has loaded a newer one meanwhile
            self._etag = answer.headers.get("etag", self._etag)
            self._store_id, self._generation = manifest.store_id, published.generation
            self.current, self._canary = policy, canary
            self._changed.notify_all()

    def _refuse_older(self, version: int, generation: int) -> None:
        """Log that the collector offers older weights than those in use."""
        self.refused_older += 1
        log.warning(
            "policy %s: refused version %d of generation %d, because version %d of generation %d "
            "is in use: the collector's weights were restored from a backup; the next published "
            "version will be used",
            self.policy_id,
            version,
            generation,
            self.version,
            self._generation,
        )


def _thread(target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name="headrace-weights", daemon=True)


def _canary(published: Published) -> tuple[NumpyPolicy, float] | None:
    """The canary's policy and share, verified; None without one. Raises if it is invalid."""
    found = published.canary
    if found is None:
        return None
    return NumpyPolicy.published(Manifest.from_json(found.manifest), found.weights), found.share


_policies = renewed_by_fork(LocalPolicy._renew)
