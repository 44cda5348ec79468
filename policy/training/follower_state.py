"""The stored state of a follower: candidates, checkpoints, versions, and how it resumes from them.

After an update it stores the weights as a candidate; then a checkpoint with the learner, the
reader's position, the rows not trained on and the candidate's digest; and once that is durable, it
publishes the version. So every live version has a checkpoint, and a start after a kill publishes
the candidate of its checkpoint if that is not live yet.

Each publication names the generation that the follower expects and the number of its lease. If
another process has published or rolled back meanwhile, the follower continues from the live
weights, or ends. While a rollback pins the policy, it stores candidates and publishes nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec

from policy.algorithms.learner import Learner
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from policy.training.checkpoint_files import CHECKPOINT, CheckpointFiles
from policy.training.replaying import refill
from policy.training.retrying import Retrying
from policy.training.settings import FollowSettings
from storage.errors import (
    GenerationConflict,
    NewerFormat,
    PolicyPinned,
    WeightsDamaged,
    WeightsNotFound,
)
from storage.experience.interfaces import ReaderState
from storage.reading.exclusion import SPOILED
from storage.reading.ledger import Ledger
from storage.reading.shard_reader import ShardReader
from storage.reading.untrained_rows import RunsByStream, UntrainedRows, position_without
from storage.system.formats import require_format
from storage.weights.lease import Lease
from storage.weights.manifest import Live, Manifest, canonical, finite
from storage.weights.off_chain import mark_off_chain
from storage.wording import counted

log = logging.getLogger("headrace.trainer")

FORMAT_VERSION = 1
_ANEW = "`headrace train --follow --no-resume` (resume=False in a program)"
SUPERSEDED = "superseded"
"""The reason for rows whose training was lost, because other weights were made live instead."""


class _Resumed(msgspec.Struct, kw_only=True):
    """What a follower's checkpoint says besides the learner."""

    position: dict[str, Any]  # the reader's
    chain: str
    generation: int  # live when it was written
    candidate: str | None  # to publish, unless it is live
    untrained: dict[str, list[list[int]]]
    not_read: dict[str, int]  # why -> rows
    spoiled: int
    format: int = FORMAT_VERSION


_decode_resumed = msgspec.json.Decoder(_Resumed).decode


class OutOfTurn(Exception):
    """Another process published or rolled back, and the job is set to end then."""


class FollowerState:
    """The checkpoints, candidates and versions of one follower.

    `conflicts` counts versions that others made live meanwhile; `pinned` is whether a rollback
    holds; `spoiled` is the number of unreadable shards, as of the last update.
    """

    def __init__(
        self,
        learner: Learner,
        reader: ShardReader,
        store: WeightStore,
        files: CheckpointFiles,
        lease: Lease,
        retrying: Retrying,
        settings: FollowSettings,
    ) -> None:
        self._learner, self._reader, self._store = learner, reader, store
        self._files, self._lease, self._retrying = files, lease, retrying
        self._settings = settings
        self.untrained = UntrainedRows()
        self.publishes = settings.publish
        self.conflicts, self.pinned, self.spoiled = 0, False, 0
        self._chain = secrets.token_hex(6)
        self._generation = 0  # the live generation that this job saw last
        self._saved_at = -1  # updates
        self._not_read: dict[str, int] = {}  # by readers of earlier runs
        self._claimed: dict[str, int] = {}  # with `_not_read`, as of the position
        self._position: dict[str, Any] = {}
        self._refilled: object = None  # the algorithm whose replay was filled

    # resuming

    def begin(self, *, resume: bool) -> None:
        """Resume from a checkpoint or the live weights, or start; publish if nothing is live."""
        live = self._live()
        found = self._retrying.do("reading the checkpoint", self._load) if resume else None
        if found is not None:
            self._take_up(found, live)
        elif resume and live is not None:
            self._go_on_from(live)
        else:
            self._retrying.do("removing earlier checkpoints", self._files.forget)
            self._generation = live.generation if live else 0
            self._learner.policy.version = live.version if live else -1
            self._note_position()
            if self.publishes:
                self.leave({})
        self._answer_restore()

    def _load(self) -> _Resumed | None:
        """The document of the latest checkpoint that both the learner and the reader accept.

        Raises NewerFormat.
        """
        while (document := self._files.load(self._learner)) is not None:
            try:
                require_format(document, FORMAT_VERSION, "follower")
                found = _decode_resumed(canonical(document))
                self._reader.load_state_dict(found.position)
            except NewerFormat as error:
                raise NewerFormat(f"{self._files.loaded}: {error}") from error
            except (ReaderState, ValueError) as error:
                self._files.set_aside(self._files.loaded, str(error))
                continue
            return found
        return None

    def _take_up(self, found: _Resumed, live: Live | None) -> None:
        """Continue from a checkpoint, and publish its candidate if that is not live yet."""
        self._note_position()
        self._chain, self._generation = found.chain, found.generation
        self.untrained = UntrainedRows(found.untrained)
        self.untrained.owe(self._position)
        self._not_read = self._claimed = found.not_read
        self.spoiled = found.spoiled
        self._saved_at = self._learner.counts.updates
        if not self.publishes:
            self._learner.policy.version = live.version if live else -1
        elif live is None:
            self._generation = 0
            self.leave({})
        else:
            self._meet(live, found.candidate)

    def _meet(self, live: Live, candidate: str | None) -> None:
        """Compare the live version with the checkpoint, and act on the difference."""
        manifest = self._retrying.do("reading what is live", partial(self._manifest, live))
        if live.generation == self._generation:
            self._took(live)
            if candidate is not None:  # the job was killed before the candidate went live
                self._publish_again(candidate)
        elif manifest is not None and manifest.candidate == candidate:
            self._took(live)
        elif manifest is not None and self._is_ours(manifest):
            self._leave_chain(manifest)
            self._took(live)
        else:
            self._lost_race(live)

    def _publish_again(self, candidate: str) -> None:
        try:
            self._store.candidate(candidate)
        except (WeightsNotFound, WeightsDamaged):
            self.leave({})
        else:
            self._go_live(candidate)

    def _is_ours(self, manifest: Manifest) -> bool:
        """Whether a version is from this chain, after the checkpoint that was loaded."""
        metrics = manifest.metrics
        later = metrics.get("update", -1) > self._learner.counts.updates
        return bool(manifest.copy_of is None and metrics.get("chain") == self._chain and later)

    def _leave_chain(self, manifest: Manifest | None) -> None:
        """Mark the versions whose checkpoints are lost as off the chain, latest first."""
        updates = self._learner.counts.updates
        while manifest is not None and self._is_ours(manifest):
            why = f"its checkpoint is lost: the trainer continued from update {updates}"
            self._mark(manifest.version, why)
            parent = manifest.parent
            try:
                manifest = None if parent is None else self._store.manifest(parent)
            except (WeightsNotFound, WeightsDamaged):
                manifest = None

    def _mark(self, version: int, why: str) -> None:
        mark = partial(mark_off_chain, self._store.files, version, why)
        self._retrying.do("marking a version", mark)
        log.error("version %d is off the chain: %s", version, why)

    def _go_on_from(self, live: Live) -> None:
        """Continue without a checkpoint, from the weights and lineage of the live version, or of
        the latest intact version before it."""
        learner = self._learner
        log.warning("no checkpoint: continuing from the live weights with a new optimizer state")
        manifest = self._take_whole(live)
        untrained = self._retrying.do(
            "reading what is live", partial(self._store.untrained, manifest.version)
        )
        at = position_without(self._reader.state_dict(), learner.lineage, untrained)
        self._reader.load_state_dict(at)
        self._note_position()
        self.untrained.owe(self._position)
        rows, update = (manifest.metrics.get(name) for name in ("rows_trained", "update"))
        if isinstance(rows, int) and isinstance(update, int):  # of a follower
            learner.counts.rows_read = learner.counts.rows_trained = rows
            learner.counts.updates = self._saved_at = update

    def _take_whole(self, live: Live) -> Manifest:
        """Load the latest intact version, up to the live one; return its manifest."""
        numbers = self._retrying.do("reading what is live", self._store.versions)
        for number in reversed([number for number in numbers if number <= live.version]):
            try:
                manifest = self._take_weights(number)
            except (WeightsDamaged, WeightsNotFound) as error:
                self._mark(number, f"it is damaged, and so is its checkpoint: {error}")
                continue
            log.warning("continuing from version %d", number)
            self._took(live)
            return manifest
        raise WeightsDamaged(
            f"{self._store.files}: expected the live version {live.version}, or an earlier "
            f"one, to be intact, but all are damaged; {_ANEW} starts with new weights"
        )

    def _take_weights(self, version: int) -> Manifest:
        """Load a version's weights and lineage. Raises WeightsDamaged, WeightsNotFound."""
        policy, store = self._learner.policy, self._store
        read = self._retrying.do
        manifest, weights = read("reading what is live", partial(store.load, version))
        if manifest.spec != policy.spec.to_json():
            raise ValueError(
                f"{store.files}: expected version {version} to have this policy's spec, got "
                f"another spec; pass that one, or use {_ANEW} to replace the version"
            )
        ranges = read("reading what is live", partial(store.lineage, version))
        self._learner.go_on_from(weights, {name: one.to_json() for name, one in ranges.items()})
        policy.filter = Policy(policy.spec, filter_state=manifest.filter_state).filter
        return manifest

    # storing

    def note_live(self) -> None:
        """Before an update: if others publish, the policy lag counts from their live version."""
        if not self.publishes and (others := self._live()) is not None:
            self._learner.policy.version = others.version

    def leave(self, metrics: Mapping[str, Any]) -> None:
        """After an update: store the weights, and publish them if this follower publishes."""
        self._note_position()
        self.spoiled = self._reader.stats.spoiled
        updates, every = self._learner.counts.updates, self._settings.checkpoint_every
        live = self.publishes and not self._still_pinned()
        if not live and updates % every:
            return
        candidate = self._retrying.do("keeping a candidate", partial(self._add, metrics))
        self._save(candidate)
        if live:
            self._go_live(candidate)
        if updates % every == 0:
            mine = CHECKPOINT if self.publishes else None  # candidates are kept as the job's result
            prune = partial(self._store.prune, self._settings.keep_versions, checkpoint=mine)
            self._retrying.do("removing old versions", prune)

    def end(self) -> None:
        """Save the updates since the last checkpoint. Rows gathered since are read again."""
        if self._learner.counts.updates > max(self._saved_at, 0):
            self._save(self._retrying.do("keeping a candidate", partial(self._add, {})))

    def _note_position(self) -> None:
        """Note the reader's position as of this update, without rows gathered later."""
        self._position = self._reader.state_dict()
        now = Counter(self._not_read)
        stats = self._reader.stats
        now.update({why: n for why, n in stats.excluded.items() if why not in SPOILED})
        if stats.lost:
            now["vanished"] += stats.lost
        self._claimed = dict(now)

    def refill(self) -> None:
        """Fill the replay of a new algorithm, once; call it between updates."""
        if self._refilled is self._learner.algorithm:
            return
        self._refilled = self._learner.algorithm
        refill(self._learner, self._store.files.objects, self._store.policy_id, self._untrained)

    def _untrained(self) -> RunsByStream:
        return self.untrained.settle(self._learner.lineage, self._position)

    def excluded(self) -> dict[str, int]:
        """Rows left out, by reason, over all runs of this job."""
        found = Counter(self._learner.counts.excluded)
        found.update(self._not_read)
        found.update(self._reader.stats.excluded)
        return dict(found)

    def _add(self, metrics: Mapping[str, Any]) -> str:
        learner = self._learner
        policy, lineage = learner.policy, learner.lineage
        return self._store.add_candidate(
            policy.get_weights(),
            spec=policy.spec.to_json(),
            metrics={
                "algorithm": type(learner.config).__name__,
                "config": finite(asdict(learner.config)),
                **finite(metrics),
                "evaluation_share": self._settings.evaluation_share or 0.0,
                "cluster": self._settings.cluster or "",
                "chain": self._chain,
                "update": learner.counts.updates,
                "rows_trained": learner.counts.rows_trained,
            },
            lineage=lineage,
            untrained=self._untrained(),
            filter_state=policy.filter.to_json(),
            checkpoint=CHECKPOINT,
        )

    def _save(self, candidate: str | None) -> None:
        document = _Resumed(
            position=self._position,
            chain=self._chain,
            generation=self._generation,
            candidate=candidate,
            untrained=self.untrained.to_json(),
            not_read=self._claimed,
            spoiled=self.spoiled,
        )
        save = partial(self._files.save, self._learner, msgspec.to_builtins(document))
        self._retrying.do("writing the checkpoint", save)
        self._saved_at = self._learner.counts.updates

    # the live version

    def is_live(self, version: int) -> bool:
        """Whether clients act with `version`."""
        live = self._live()
        return live is not None and live.version == version

    def is_refused(self) -> bool:
        """Whether a collector refuses to serve the live version."""
        live = self._live()
        return live is not None and any(
            record.wanted_generation == live.generation and record.why is not None
            for record in self._store.served.registered(time.time())
        )

    def _answer_restore(self) -> None:
        """Publish at once after a backup was restored.

        Collectors then serve a later version than the live one, and change only to a newer one.
        """
        if self.publishes and self._retrying.do("reading what is live", self._is_restored):
            log.warning("%s", self._store.restored)
            self.leave({})

    def _is_restored(self) -> bool:
        return self._store.restored is not None

    def _live(self) -> Live | None:
        return self._retrying.do("reading what is live", self._store.mended_live)

    def _took(self, live: Live) -> None:
        self._generation = live.generation
        self._learner.policy.version = live.version
        self.pinned = live.hold is not None

    def _go_live(self, candidate: str) -> None:
        """Publish a candidate; if another process has changed the live version, follow that."""
        while True:
            publish = partial(
                self._store.publish,
                candidate,
                expected_generation=self._generation,
                fence=self._lease.fence,
            )
            try:
                return self._took(self._retrying.do("publishing", publish))
            except (GenerationConflict, PolicyPinned) as error:
                live = self._live()
                same = live is not None and live.version == self._learner.policy.version
                if live is None or not same:
                    return self._lost_race(live)
                self._took(live)
                if live.hold is not None:
                    return log.warning("%s; candidates are stored until then", error)
            except WeightsNotFound as error:  # the store was restored from a backup meanwhile
                log.warning("%s", error)
                live = self._live()
                if live is not None and live.generation != self._generation:
                    return self._lost_race(live)
                return self.leave({})

    def _still_pinned(self) -> bool:
        """Whether the rollback that was seen still holds."""
        if self.pinned:
            live = self._live()
            self.pinned = live is not None and live.hold is not None
            if not self.pinned:
                log.warning("the rollback was ended: publishing again")
        return self.pinned

    def _lost_race(self, live: Live | None) -> None:
        """Another process's version is live: continue from it, or end."""
        self.conflicts += 1
        if live is None:
            self._generation = 0
            return log.warning("no version is live any more: the next update will be published")
        text = "version %d was made live by another process (generation %d, expected %d)"
        log.warning(text, live.version, live.generation, self._generation)
        if self._settings.on_conflict == "end":
            raise OutOfTurn(
                f"{self._store.policy_id}: version {live.version} was made live by another process"
            )
        self._reload(live)
        return None

    def _reload(self, live: Live) -> None:
        """Load the live weights. Rows that were trained into other weights count as superseded."""
        counts, before = self._learner.counts, self._learner.lineage
        try:
            manifest = self._take_weights(live.version)
        except (WeightsDamaged, WeightsNotFound) as error:
            log.error("the live version cannot be read; the next update replaces it: %s", error)
            return self._took(live)
        self._took(live)
        known = self._store.untrained(live.version)
        after = self._learner.lineage
        self.untrained = UntrainedRows.behind(known, after, self._position)
        kept = _rows_kept(manifest, before, after)
        superseded = max(0, counts.rows_trained - kept)
        if superseded:
            counts.excluded[SUPERSEDED] = counts.excluded.get(SUPERSEDED, 0) + superseded
            counts.rows_trained -= superseded
        rows = counted(superseded, "row is", "rows are")
        log.warning("continuing from version %d; %s superseded", live.version, rows)
        self._save(None)
        return self._answer_restore()

    def _manifest(self, live: Live) -> Manifest | None:
        try:
            return self._store.manifest(live.version)
        except (WeightsDamaged, WeightsNotFound):
            return None


def _rows_kept(manifest: Manifest, before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """How many of our rows a version was trained on: its number, if all of its rows are ours."""
    rows = manifest.metrics.get("rows_trained")
    ours = not len(Ledger(after).without(Ledger(before)))
    return rows if ours and isinstance(rows, int) else 0
