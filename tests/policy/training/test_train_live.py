"""Following a log: weights before any row, each row once through kills, old rows excluded.

Also of `policy.training.retrying`.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from policy.algorithms.ppo import PPOConfig
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.tracking import begin
from policy.training.settings import FollowSettings
from policy.training.train_live import follow
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.sample_batch import SampleBatch
from storage.reading.holdout import Reserve
from tests.policy.training.live_log import (
    ACTION,
    CONFIG,
    OBSERVATION,
    SPEC,
    STREAM,
    declare,
    part,
    write,
)


@pytest.fixture
def root(tmp_path):
    return declare(tmp_path)


def run(root, updates, **settings):
    """Follow for so many updates, or until no rows arrive for long; (result, reports)."""
    reports, asked = [], iter(range(300))
    given = {name: settings.pop(name) for name in ("spec", "run") if name in settings}
    result = follow(
        root,
        "default",
        CONFIG,
        FollowSettings(**{"steps_per_update": 100, **settings}),
        stop=lambda: len(reports) >= updates or next(asked, None) is None,
        on_update=reports.append,
        **given,
    )
    return result, reports


def test_the_initial_weights_are_version_1_before_any_row(root):
    """Clients can act at once; a second start publishes nothing more."""
    for _ in range(2):
        result = follow(root, "default", CONFIG, stop=lambda: True)
        assert (result.version, result.updates) == (1, 0)
    manifest = WeightStore(root, "default").manifest(1)
    assert PolicySpec.from_json(manifest.spec) == SPEC


def test_each_update_goes_live_with_its_lineage_and_metrics(root):
    """100 fresh rows make a version; the lag counts from the version that was live."""
    write(root, *(part(i) for i in range(30)))
    result, reports = run(root, 3)
    store = WeightStore(root, "default")
    assert (result.version, result.updates, result.rows_trained) == (4, 3, 300)
    assert store.live().version == 4
    assert [m["version"] for m in reports] == [2, 3, 4]
    assert [m["policy_lag_mean"] for m in reports] == [0, 1, 2]
    assert [m["rows_trained"] for m in reports] == [100, 200, 300]
    wanted = {"ess", "kl_k1", "kl_k3", "clip_fraction", "entropy", "explained_variance"}
    assert wanted | {"seconds", "publish_seconds", "policy_lag_max"} <= set(reports[0])
    for version in (2, 3, 4):
        lineage = store.lineage(version)[STREAM].ranges()
        assert lineage == [(0, (version - 1) * 10 - 1)]
    assert store.manifest(4).metrics["kl_k3"] == pytest.approx(reports[-1]["kl_k3"])


def test_rows_of_versions_too_old_are_left_out_and_counted(root):
    """With `max_lag=1` the third update has no row that is new enough; its version is published.

    Otherwise clients that wait for it would wait forever.
    """
    write(root, *(part(i) for i in range(30)), *(part(30 + i, version=4) for i in range(10)))
    result, reports = run(root, 4, max_lag=1)
    assert result.excluded == {"stale": 100}
    assert (result.rows_read, result.rows_trained) == (400, 300)
    assert [m["version"] for m in reports] == [2, 3, 4, 5]
    assert [m["policy_lag_max"] for m in reports] == pytest.approx([0, 1, np.nan, 0], nan_ok=True)


def test_logged_rows_make_no_update_and_unusable_ones_count_towards_it(root):
    """A collector that holds its clients counts the policy's steps, trainable or not."""
    write(
        root,
        *(part(i, source=1) for i in range(20)),  # logged
        *(part(20 + i, ended="abandoned") for i in range(10)),  # no final observation
    )
    result, _ = run(root, 1)
    assert result.rows_trained == 90
    assert result.excluded == {"not_on_policy": 200, "no_next_obs": 10}


def test_rows_gathered_but_not_learned_from_are_read_again(root):
    """A run that stops with half an update's rows leaves them to the next run."""
    write(root, *(part(i, source=i % 2) for i in range(10)))  # 50 rows of its own, 50 logged
    asked = iter(range(10))
    settings = FollowSettings(steps_per_update=100)
    follow(root, "default", CONFIG, settings, stop=lambda: next(asked, None) is None)
    write(root, *(part(10 + i) for i in range(5)))
    result, _ = run(root, 1)
    assert (result.rows_read, result.rows_trained) == (150, 100)


def test_parts_of_an_episode_that_goes_on_are_learned_from(root):
    """A part's last row bootstraps from the final observation that it carries."""
    after = np.ones(4, np.float32).tobytes()
    cut = [part(i, ended=None, final_obs=after) for i in range(10)]
    write(root, *cut)
    result, _ = run(root, 1)
    assert (result.rows_trained, result.excluded) == (100, {})


def test_without_a_checkpoint_it_goes_on_from_what_is_live(root):
    """Its weights and their lineage are kept: no row is trained on again."""
    write(root, *(part(i) for i in range(10)))
    run(root, 1)
    shutil.rmtree(root / "weights" / "default" / "checkpoints")
    store = WeightStore(root, "default")
    _, before = store.load(2)
    write(root, *(part(10 + i, version=2) for i in range(10)))
    reports = []
    follow(
        root,
        "default",
        PPOConfig(epochs=1, lr=1e-9),
        settings=FollowSettings(seed=5, steps_per_update=100),
        stop=lambda: bool(reports),
        on_update=reports.append,
    )
    assert reports[0]["policy_lag_mean"] == 0
    manifest, after = store.load(3)
    assert manifest.parent == 2
    for name, array in after.items():
        np.testing.assert_allclose(array, before[name], atol=1e-6)
    assert store.lineage(3)[STREAM].ranges() == [(0, 19)]


def test_checkpoints_may_be_in_another_folder(root, tmp_path):
    """Its path may be a str."""
    write(root, *(part(i) for i in range(10)))
    run(root, 1, checkpoint_dir=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").glob("follow.*.safetensors"))


def test_starting_over_replaces_what_is_live(root):
    """`resume=False` publishes new weights at once, and trains on every row again."""
    write(root, *(part(i) for i in range(10)))
    run(root, 1)
    result, reports = run(root, 1, resume=False, seed=3)
    assert (result.version, result.rows_trained, len(reports)) == (4, 100, 1)


def test_another_spec_than_the_live_one_is_refused(root):
    """Neither a checkpoint nor live weights continue with another spec."""
    follow(root, "default", CONFIG, stop=lambda: True)
    other = PolicySpec(OBSERVATION, ACTION, ModuleSpec(hidden=(9,)))
    with pytest.raises(ValueError, match="another spec and PPOConfig"):
        follow(root, "default", CONFIG, stop=lambda: True, spec=other)
    shutil.rmtree(root / "weights" / "default" / "checkpoints")
    with pytest.raises(ValueError, match="another spec; pass that one"):
        follow(root, "default", CONFIG, stop=lambda: True, spec=other)


def test_between_declared_spaces_it_goes_on_with_the_live_network(root):
    """Defaults may differ between releases: without a declared spec, a root that an earlier one
    wrote keeps its network, from its checkpoint or without. A new root standardises observations.
    """
    save_declaration(root, PolicyDeclaration(observation=OBSERVATION, action=ACTION))
    write(root, *(part(n) for n in range(40)))
    run(root, 1, spec=SPEC)
    store = WeightStore(root, "default")
    for _ in range(2):
        result, _ = run(root, 1, spec=None)
        assert store.manifest(result.version).spec == SPEC.to_json()
        shutil.rmtree(root / "weights/default/checkpoints")
    result, _ = run(root, 1, spec=None, resume=False)
    anew = store.manifest(result.version)
    assert anew.spec["observation_filter"] == "MeanStdFilter"
    assert anew.filter_state["clip"] == 10.0


def test_without_publishing_there_are_candidates_alone(root):
    """The candidates are left for another program to judge."""
    write(root, *(part(i) for i in range(20)))
    result, _ = run(root, 2, publish=False, checkpoint_every=1)
    store = WeightStore(root, "default")
    assert (result.version, store.live(), len(store.candidates())) == (-1, None, 2)


def test_old_versions_go(root):
    """Only the newest versions and their candidates are kept."""
    write(root, *(part(i, steps=10) for i in range(30)))
    run(root, 30, steps_per_update=10, keep_versions=4, checkpoint_every=2)
    store = WeightStore(root, "default")
    assert store.versions() == [28, 29, 30, 31]
    assert len(store.candidates()) == 4


def test_settings_and_roots_that_do_not_fit_are_refused(root):
    """The error names what is wrong."""
    with pytest.raises(ValueError, match="steps_per_update"):
        follow(root, "default", settings=FollowSettings(steps_per_update=0), stop=lambda: True)
    with pytest.raises(ValueError, match=r"policies/nobody\.json"):
        follow(root, "nobody", stop=lambda: True)


CHILD = """
import dataclasses, json, os, signal, sys
from policy.algorithms.ppo import PPO, PPOConfig
from policy.training.settings import FollowSettings
from policy.training.train_live import follow

root, record, kill_at, where = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def die(update, place):
    if (update, place) == (kill_at, where):
        os.kill(os.getpid(), signal.SIGKILL)

class Recording(PPO):
    def update(self, batch, rng, *rest):
        rows = list(zip(batch["ordinal"].tolist(), batch["t"].tolist()))
        line = json.dumps([self.trained, batch["stream"][0], rows]) + chr(10)
        fd = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)
        metrics = super().update(batch, rng, *rest)
        die(self.trained // 100, "middle")
        return metrics

@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingConfig(PPOConfig):
    def build(self, policy):
        return Recording(policy, self)

done = []
asked = iter(range(300))  # an idle end, in case rows were lost
def on_update(metrics):
    done.append(metrics["update"])
    die(metrics["update"], "after")

follow(root, "default", RecordingConfig(epochs=1),
       FollowSettings(steps_per_update=100, checkpoint_every=2),
       stop=lambda: done[-1:] == [12] or next(asked, None) is None, on_update=on_update)
"""


@pytest.mark.long
def test_through_kills_each_row_is_trained_on_exactly_once(root, tmp_path):
    """SIGKILL in the middle of an update, after one that was not saved, and after one that was.

    The last weights were trained on each row once, and their lineage says so. Updates of 100 rows
    cut parts of 37, so that positions lie inside parts.
    """
    parts = [part(i, steps=37, final_obs=None) for i in range(32)] + [part(32, steps=16)]
    for first in range(0, 33, 4):
        write(root, *parts[first : first + 4])
    record = tmp_path / "record"
    arguments = [sys.executable, "-c", CHILD, str(root), str(record)]
    for kill_at, where in ((3, "middle"), (5, "after"), (8, "after")):
        killed = subprocess.run([*arguments, str(kill_at), where], check=False)
        assert killed.returncode == -signal.SIGKILL
    subprocess.run([*arguments, "-1", ""], check=True)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    history = {trained: rows for trained, _, rows in lines}  # a later run's update replaces
    assert len(lines) > len(history) == 12
    found = Counter((ordinal, t) for rows in history.values() for ordinal, t in rows)
    assert found == Counter((p.ordinal, t) for p in parts for t in range(p.steps))
    store = WeightStore(root, "default")
    live = store.live().version
    assert store.lineage(live)[STREAM].ranges() == [(0, 32)]
    assert store.manifest(live).metrics["rows_trained"] == 1200


def test_tensorboard_reads_what_each_update_said(root, tmp_path):
    """Each metric of each update is an event, at the number of rows trained on."""
    write(root, *(part(i) for i in range(30)))
    tracker = begin("tensorboard", tmp_path, "default")
    _, reports = run(root, 3, run=tracker)
    tracker.close()
    events = EventAccumulator(tracker.uri.partition(":")[2].partition("#")[0]).Reload()
    assert set(events.Tags()["scalars"]) == {f"train/{name}" for name in reports[0]}
    lags = events.Scalars("train/policy_lag_mean")
    assert [(e.step, e.value) for e in lags] == [
        (m["rows_trained"], m["policy_lag_mean"]) for m in reports
    ]
    assert WeightStore(root, "default").manifest(4).metrics["run"] == tracker.uri


def test_reserved_rows_count_and_are_left_out_by_name(root):
    """An update counts reserved rows, but they are neither trained on nor in its lineage.

    The version's manifest has the share, for the judge.
    """
    write(root, *(part(i, version=1) for i in range(20)))
    result, _ = run(root, 2, evaluation_share=0.4)
    assert (result.updates, result.rows_read) == (2, 200)
    assert result.excluded == {"reserved": 200 - result.rows_trained}
    store = WeightStore(root, "default")
    assert store.manifest(3).metrics["evaluation_share"] == 0.4
    trained = {n for a, b in store.lineage(3)[STREAM].ranges() for n in range(a, b + 1)}
    reserve = Reserve(0.4)
    for i in range(20):
        batch = SampleBatch(eps_id=np.array([f"e{i}"], object))
        assert reserve.rows(batch)[0] == (i not in trained)
    assert 0 < len(trained) < 20
