"""What a follower leaves behind, and how it finds its way back to where it was.

After an update: the weights as a candidate; then a checkpoint with the learner, the reader's
position, the rows not trained on and the candidate's digest; then, once that is durable, the
version. So no version is live whose checkpoint could be missing, and a start after a kill publishes
what its checkpoint says and the kill kept from going live.

All that a follower publishes expects the generation that it saw, and carries the number of its
lease. When somebody else published or rolled back in between, it goes on from what is live, or
ends. While a rollback pins the policy, candidates are kept and nothing is published.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from policy.algorithms.learner import Learner
from policy.inference.weight_store import WeightStore
from policy.jobs.checkpoint_files import CHECKPOINT, CheckpointFiles
from policy.jobs.retrying import Retrying
from policy.networks.policy import Policy
from storage.errors import GenerationConflict, PolicyPinned, WeightsDamaged, WeightsNotFound
from storage.experience.interfaces import ReaderState
from storage.reading.exclusion import SPOILED
from storage.reading.ledger import Ledger
from storage.reading.shard_reader import Reserve, ShardReader
from storage.reading.untrained_rows import UntrainedRows, position_without
from storage.weights.lease import Lease
from storage.weights.manifest import Live, Manifest, finite
from storage.weights.off_chain import mark_off_chain

__all__ = ["FollowerState", "FollowerStateSettings", "OnConflict", "OutOfTurn"]

log = logging.getLogger("headrace.trainer")

OnConflict: TypeAlias = Literal["reload", "end"]
_ANEW = "`headrace train --follow --no-resume` (resume=False in a program)"
SUPERSEDED = "superseded"
"""Rows whose training is not in the weights any more: others were made live in their place."""


class OutOfTurn(Exception):
    """Somebody else published or rolled back, and the job was to end then."""


@dataclass(frozen=True)
class FollowerStateSettings:
    """What to leave behind. `checkpoint_every`: updates, while nothing is published."""

    publish: bool
    checkpoint_every: int
    keep_versions: int
    on_conflict: OnConflict
    reserve: Reserve = field(default_factory=Reserve)

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "keep_versions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)!r}")
        if self.on_conflict not in get_args(OnConflict):
            raise ValueError(f"on_conflict: expected reload or end, got {self.on_conflict!r}")


class FollowerState:
    """The checkpoints, candidates and versions of one follower.

    `conflicts` counts what others made live meanwhile; `pinned` is whether a rollback holds;
    `spoiled` are the rows of shards that were left out by the last update.
    """

    def __init__(
        self,
        learner: Learner,
        reader: ShardReader,
        store: WeightStore,
        files: CheckpointFiles,
        lease: Lease,
        retrying: Retrying,
        settings: FollowerStateSettings,
    ) -> None:
        self._learner, self._reader, self._store = learner, reader, store
        self._files, self._lease, self._retrying = files, lease, retrying
        self._settings = settings
        self.untrained = UntrainedRows()
        self.publishes = settings.publish
        self.conflicts, self.pinned, self.spoiled = 0, False, 0
        self._chain = secrets.token_hex(6)
        self._generation = 0  # that was live when this job looked last
        self._saved_at = -1  # updates
        self._not_read: dict[str, int] = {}  # by readers of earlier runs
        self._claimed: dict[str, int] = {}  # with `_not_read`, as of the position
        self._position: dict[str, Any] = {}

    # where to go on

    def begin(self, *, resume: bool) -> None:
        """Find where to go on, and see to it that a version is live."""
        live = self._live()
        document = self._retrying.do("reading the checkpoint", self._load) if resume else None
        if document is not None:
            self._take_up(document, live)
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

    def _load(self) -> dict[str, Any] | None:
        """The document of the latest checkpoint that can be used, by learner and by reader."""
        while (document := self._files.load(self._learner)) is not None:
            position = document["position"]
            try:
                self._reader.load_state_dict(position)
            except ReaderState as error:
                self._files.set_aside(self._files.loaded, str(error))
                continue
            return document
        return None

    def _take_up(self, document: dict[str, Any], live: Live | None) -> None:
        """Go on from a checkpoint, and publish what it was to be followed by."""
        self._note_position()
        self._chain = document.get("chain", self._chain)
        self._generation = document.get("generation", live.generation if live else 0)
        self.untrained = UntrainedRows(document.get("untrained"))
        self.untrained.owe(self._position)
        self._not_read = self._claimed = document.get("not_read", {})
        self.spoiled = document.get("spoiled", 0)
        self._saved_at = self._learner.counts.updates
        if not self.publishes:
            self._learner.policy.version = live.version if live else -1
        elif live is None:
            self._generation = 0
            self.leave({})
        else:
            self._meet(live, document.get("candidate"))

    def _meet(self, live: Live, candidate: str | None) -> None:
        """Hold what is live against what the checkpoint says."""
        manifest = self._retrying.do("reading what is live", partial(self._manifest, live))
        if live.generation == self._generation:
            self._took(live)
            if candidate is not None:  # killed before it went live
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
        """Whether a version is from a later checkpoint of this chain than the one that is left."""
        metrics = manifest.metrics
        later = metrics.get("update", -1) > self._learner.counts.updates
        return bool(manifest.copy_of is None and metrics.get("chain") == self._chain and later)

    def _leave_chain(self, manifest: Manifest | None) -> None:
        """Mark the versions whose checkpoints are lost, from the latest on backwards."""
        updates = self._learner.counts.updates
        while manifest is not None and self._is_ours(manifest):
            why = f"its checkpoint is lost: the trainer went on from update {updates}"
            self._mark(manifest.version, why)
            parent = manifest.parent
            try:
                manifest = None if parent is None else self._store.manifest(parent)
            except (WeightsNotFound, WeightsDamaged):
                manifest = None

    def _mark(self, version: int, why: str) -> None:
        mark = partial(mark_off_chain, self._store.directory, version, why)
        self._retrying.do("marking a version", mark)
        log.error("version %d is off the chain: %s", version, why)

    def _go_on_from(self, live: Live) -> None:
        """No checkpoint is left: the weights of what is live, or of the latest version before it
        that is whole, and the rows behind them."""
        learner = self._learner
        log.warning("no checkpoint: going on from what is live; the optimizer begins anew")
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
        """Take the weights of the latest version that can be read; its manifest."""
        numbers = self._retrying.do("reading what is live", self._store.versions)
        for number in reversed([number for number in numbers if number <= live.version]):
            try:
                manifest = self._take_weights(number)
            except (WeightsDamaged, WeightsNotFound) as error:
                self._mark(number, f"it is damaged, and so is its checkpoint: {error}")
                continue
            log.warning("going on from version %d", number)
            self._took(live)
            return manifest
        raise WeightsDamaged(
            f"{self._store.directory}: expected version {live.version}, which is live, or one "
            f"before it to be whole; {_ANEW} begins anew"
        )

    def _take_weights(self, version: int) -> Manifest:
        """A version's weights and lineage. Raises WeightsDamaged, WeightsNotFound."""
        policy, store = self._learner.policy, self._store
        read = self._retrying.do
        manifest, weights = read("reading what is live", partial(store.load, version))
        if manifest.spec != policy.spec.to_json():
            raise ValueError(
                f"{store.directory}: expected version {version} to be of this policy's spec, got "
                f"another; pass its spec, or {_ANEW} to replace it"
            )
        ranges = read("reading what is live", partial(store.lineage, version))
        self._learner.go_on_from(weights, {name: one.to_json() for name, one in ranges.items()})
        policy.filter = Policy(policy.spec, filter_state=manifest.filter_state).filter
        return manifest

    # what is left behind

    def note_live(self) -> None:
        """Before an update: where others publish, a step's lag counts from what they made live."""
        if not self.publishes and (others := self._live()) is not None:
            self._learner.policy.version = others.version

    def leave(self, metrics: Mapping[str, Any]) -> None:
        """After an update: keep it, and make it live."""
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
            mine = CHECKPOINT if self.publishes else None  # else they are the result
            prune = partial(self._store.prune, self._settings.keep_versions, checkpoint=mine)
            self._retrying.do("removing old versions", prune)

    def end(self) -> None:
        """Save what was learned since the last checkpoint: rows gathered since are read again."""
        if self._learner.counts.updates > max(self._saved_at, 0):
            self._save(self._retrying.do("keeping a candidate", partial(self._add, {})))

    def _note_position(self) -> None:
        """The reader's position as of the last update: what was gathered since is not in it."""
        self._position = self._reader.state_dict()
        now = Counter(self._not_read)
        stats = self._reader.stats
        now.update({why: n for why, n in stats.excluded.items() if why not in SPOILED})
        if stats.lost:
            now["vanished"] += stats.lost
        self._claimed = dict(now)

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
                "evaluation_share": self._settings.reserve.share,
                "cluster": self._settings.reserve.cluster,
                "chain": self._chain,
                "update": learner.counts.updates,
                "rows_trained": learner.counts.rows_trained,
            },
            lineage=lineage,
            untrained=self.untrained.settle(lineage, self._position),
            filter_state=policy.filter.to_json(),
            checkpoint=CHECKPOINT,
        )

    def _save(self, candidate: str | None) -> None:
        document = {
            "position": self._position,
            "chain": self._chain,
            "generation": self._generation,
            "candidate": candidate,
            "untrained": self.untrained.to_json(),
            "not_read": self._claimed,
            "spoiled": self.spoiled,
        }
        save = partial(self._files.save, self._learner, document)
        self._retrying.do("writing the checkpoint", save)
        self._saved_at = self._learner.counts.updates

    # what is live

    def is_live(self, version: int) -> bool:
        """Whether that is the version which clients act with."""
        live = self._live()
        return live is not None and live.version == version

    def is_refused(self) -> bool:
        """Whether a collector has looked at what is live, and refused it."""
        live = self._live()
        return live is not None and any(
            record.wanted_generation == live.generation and record.why is not None
            for record in self._store.served.registered(time.time())
        )

    def _answer_restore(self) -> None:
        """Where a backup was put back, collectors serve a later version than what is live: they
        take up nothing before the next one."""
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
        """Publish; if that cannot be, because somebody else acted meanwhile, follow them."""
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
                    return log.warning("%s; candidates are kept", error)
            except WeightsNotFound as error:  # the store was put back from a backup this moment
                log.warning("%s", error)
                live = self._live()
                if live is not None and live.generation != self._generation:
                    return self._lost_race(live)
                return self.leave({})

    def _still_pinned(self) -> bool:
        """Whether the rollback that was met holds; asked again before each update is kept."""
        if self.pinned:
            live = self._live()
            self.pinned = live is not None and live.hold is not None
            if not self.pinned:
                log.warning("the rollback was ended: publishing again")
        return self.pinned

    def _lost_race(self, live: Live | None) -> None:
        """Somebody else's version is live: go on from it, or end."""
        self.conflicts += 1
        if live is None:
            self._generation = 0
            return log.warning("nothing is live any more: the next update is published")
        text = "version %d was made live by somebody else (generation %d, expected %d)"
        log.warning(text, live.version, live.generation, self._generation)
        if self._settings.on_conflict == "end":
            raise OutOfTurn(
                f"{self._store.policy_id}: version {live.version} was made live by somebody else"
            )
        self._reload(live)
        return None

    def _reload(self, live: Live) -> None:
        """Take the live weights. What was trained into others counts as superseded."""
        counts, before = self._learner.counts, self._learner.lineage
        try:
            manifest = self._take_weights(live.version)
        except (WeightsDamaged, WeightsNotFound) as error:
            log.error("what is live cannot be read, and is replaced by the next update: %s", error)
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
        log.warning("going on from version %d; %d rows are superseded", live.version, superseded)
        self._save(None)
        return self._answer_restore()

    def _manifest(self, live: Live) -> Manifest | None:
        try:
            return self._store.manifest(live.version)
        except (WeightsDamaged, WeightsNotFound):
            return None


def _rows_kept(manifest: Manifest, before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """How many rows of ours are behind a version: all that it says, if each of them was ours."""
    rows = manifest.metrics.get("rows_trained")
    ours = not len(Ledger(after).without(Ledger(before)))
    return rows if ours and isinstance(rows, int) else 0
