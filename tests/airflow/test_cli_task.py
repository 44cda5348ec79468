"""The factory: one command per task, its last line is the XCom, no child outlives the task."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

DAGS = Path(__file__).parents[2] / "airflow_dags"
from airflow.sdk.exceptions import (  # noqa: E402 - as below
    AirflowFailException,
    AirflowSkipException,
    TaskDeferred,
)
from cli_task import HeadraceError, cli_task, last_line  # noqa: E402 - needs the line above

HERE = Path(__file__).parent


@pytest.fixture
def trainer(write_log, loaded, tmp_path):
    """The values of a training task that takes longer than any test."""
    write_log(tmp_path, 0, 2000)
    result = subprocess.run(
        [loaded / "headrace", "freeze", "--root", tmp_path, "--json"],
        check=True,
        capture_output=True,
    )
    return {"root": str(tmp_path), "manifest": json.loads(result.stdout)["manifest"]}


def start_and_kill(values, *how):
    """Kill a task's process with SIGKILL while its trainer runs; return the trainer's pidfd and
    pid."""
    task = subprocess.Popen(
        [sys.executable, HERE / "hold_task.py", json.dumps(values), *how],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = Path(values["manifest"]).parent
    pause = threading.Event()
    while not (found := [text for p in folder.glob("*.lock") if (text := p.read_text().strip())]):
        assert task.poll() is None
        pause.wait(0.02)
    trainer = os.pidfd_open(int(found[0]))
    os.kill(task.pid, signal.SIGKILL)
    task.wait()
    return trainer, int(found[0])


def ended(pidfd, seconds):
    """Whether a process ends within that time."""
    return bool(select.select([pidfd], [], [], seconds)[0])


def test_sigkill_of_the_task_leaves_no_trainer(trainer):
    """The kernel signals the command, which could not know otherwise."""
    pidfd, _ = start_and_kill(trainer, "tied")
    assert ended(pidfd, 60)
    os.close(pidfd)


def test_without_the_tie_the_trainer_would_live_on(trainer, tmp_path):
    """The check above can fail: the same command survives its task if it is not tied to it."""
    loose = tmp_path / "loose"
    command = os.environ["HEADRACE_COMMAND"]
    loose.write_text(f'#!/bin/sh\nunset HEADRACE_PARENT\nexec "{command}" "$@"\n')
    loose.chmod(0o755)
    pidfd, pid = start_and_kill(trainer, "loose", str(loose))
    survived = not ended(pidfd, 2)
    if survived:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert survived, pid


def test_words_are_passed_as_they_are():
    """No shell is between the task and the command, so that no value can become another word."""
    task = cli_task("train", "--root={root}", "--seed=1", root="{{ params.root }}")
    assert task.words == ["train", "--root={{ params.root }}", "--seed=1"]
    assert task.template_fields == ("words", "undecided_for")


@pytest.mark.parametrize(("word", "value"), [("{nobody}", "root"), ("--root=/r", "seed")])
def test_words_and_values_belong_together(word, value):
    """Otherwise a value would be ignored silently."""
    with pytest.raises(ValueError, match=value):
        cli_task("train", word, **{value: "1"})


class Context(dict):
    """What a task gets of Airflow, as far as these tests need it."""

    def __init__(self, **more):
        super().__init__(params={}, ti=self, **more)
        self.dag_id, self.run_id, self.task_id, self.map_index = "d", "r 1", "t", -1
        self.try_number, self.told, self.log = 1, {}, logging.getLogger("test")

    def xcom_push(self, *, key, value):
        self.told[key] = value


@pytest.fixture
def ending(tmp_path, monkeypatch):
    """ending(status, out, err): a command that ends so."""

    def make(status, out="", err=""):
        script = tmp_path / "headrace"
        script.write_text(f"#!/bin/sh\necho '{out}'\necho '{err}' >&2\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("HEADRACE_COMMAND", str(script))

    return make


REASONS = '{"gate": {"reasons": ["too few"]}}'


@pytest.mark.parametrize(
    ("status", "out", "err", "expected", "reason"),
    [
        (4, REASONS, "x", AirflowSkipException, "too few"),
        (6, "", "headrace: pinned by ann", AirflowSkipException, "pinned by ann"),
        (7, "", "headrace: no shard yet", AirflowSkipException, "no shard yet"),
        (99, REASONS, "", AirflowSkipException, "too few"),
        (2, "", "headrace: --seed", AirflowFailException, "--seed"),
        (1, "", "headrace: disk full", HeadraceError, "disk full"),
        (3, "", "held by b", TaskDeferred, None),
        (0, "done", "", HeadraceError, "last line"),
    ],
)
def test_a_status_decides_what_becomes_of_the_task(ending, status, out, err, expected, reason):
    """Held, nothing new, cannot tell: skipped with the reason. Wrong usage: not tried again. A
    lease elsewhere: the task waits without a worker."""
    ending(status, out, err)
    context = Context()
    with pytest.raises(expected) as raised:
        cli_task("publish").execute(context)
    assert isinstance(raised.value, AirflowFailException) == (status == 2)
    assert reason is None or reason in str(raised.value)
    assert context.told == ({"reason": reason} if expected is AirflowSkipException else {})


def test_an_undecided_canary_is_asked_again_until_time_is_over(ending):
    """Deferred while it is undecided; later its answer is the result; `worse` is one at once."""
    task = cli_task("canary", operator={"answers": (1, 4), "undecided_for": 60, "poll": 7})
    ending(4, '{"state": "too young"}')
    with pytest.raises(TaskDeferred) as raised:
        task.execute(Context())
    assert raised.value.trigger.seconds == 7
    began = raised.value.kwargs["began"]
    with pytest.raises(TaskDeferred):
        task.again(Context(), began=began)
    assert task.again(Context(), began=began - 61) == {"state": "too young"}
    ending(1, '{"state": "worse"}')
    assert task.execute(Context()) == {"state": "worse"}
    ending(1, "", "headrace: disk full")
    with pytest.raises(HeadraceError):
        task.execute(Context())


def test_the_reason_of_a_skip_becomes_the_tasks_note(ending, hook, monkeypatch):
    """Through Airflow's API; one that does not answer changes nothing."""
    ending(6, "", "headrace: pinned")
    monkeypatch.setenv("HEADRACE_AIRFLOW_URL", hook.url)
    monkeypatch.setenv("HEADRACE_AIRFLOW_TOKEN", "t0ken")
    for _ in range(2):
        with pytest.raises(AirflowSkipException):
            cli_task("publish").execute(Context())
        monkeypatch.setenv("HEADRACE_AIRFLOW_URL", "http://127.0.0.1:9")
    place = "/api/v2/dags/d/dagRuns/r%201/taskInstances/t?update_mask=note"
    assert hook.calls == [("PATCH", place, "Bearer t0ken", {"note": "pinned"})]


def test_a_run_that_an_event_started_names_the_events_ordinals(ending):
    """The highest of each stream, whether a watcher or a post to the API told them."""
    task = cli_task("freeze", operator={"up_to": True})
    said = []
    task._run = lambda words: said.append(words) or (0, "{}", "")
    extras = [{"payload": {"streams": {"a": 3}}}, {"streams": {"a": 9, "b": 1}}, {}]
    events = [SimpleNamespace(extra=extra) for extra in extras]
    task.execute(Context(triggering_asset_events={"shards": events}))
    task.execute(Context())
    assert said == [["freeze", "--up-to=a=9", "--up-to=b=1"], ["freeze"]]


@pytest.mark.parametrize("text", ["", "done", "[1]", "{"])
def test_a_last_line_that_is_no_object_is_an_error(text):
    """An invalid XCom fails in its own task, not in the next, with the line in the message."""
    with pytest.raises(HeadraceError, match="last line"):
        last_line(text)
    assert last_line('{"a": 1}') == {"a": 1}
