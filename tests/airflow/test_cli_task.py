"""The factory: one command per task, its last line is the XCom, no child outlives the task."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

DAGS = Path(__file__).parents[2] / "airflow_dags"
sys.path.append(str(DAGS))  # as Airflow does with its dags folder

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


def start_and_kill(values, *, tied):
    """Kill a task's process with SIGKILL while its trainer runs; return the trainer's pidfd and
    pid."""
    task = subprocess.Popen(
        [sys.executable, HERE / "hold_task.py", json.dumps(values), "tied" if tied else "loose"],
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
    pidfd, _ = start_and_kill(trainer, tied=True)
    assert ended(pidfd, 60)
    os.close(pidfd)


def test_without_the_tie_the_trainer_would_live_on(trainer):
    """The check above can fail: the same command survives its task if it is not tied to it."""
    pidfd, pid = start_and_kill(trainer, tied=False)
    survived = not ended(pidfd, 2)
    if survived:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert survived, pid


def test_the_shell_becomes_the_command():
    """exec: the task's child is Headrace, not a shell between the two."""
    task = cli_task("train", "--root={root}", "--seed=1", root="{{ params.root }}")
    assert task.bash_command == (
        'HEADRACE_PARENT=$PPID exec "${HEADRACE_COMMAND:-headrace}" train '
        '"--root=${arg_root}" "--seed=1" --json'
    )
    assert task.env == {"arg_root": "{{ params.root }}"}
    assert (task.task_id, task.append_env, list(task.skip_on_exit_code)) == ("train", True, [99])


@pytest.mark.parametrize("word", ["$(id)", 'a"b', "`id`", "a\\b", "{{ x }}", "{nobody}"])
def test_a_word_that_the_shell_would_read_is_refused(word):
    """Plain text and {name} only; everything else is a value."""
    with pytest.raises(ValueError, match="word"):
        cli_task("train", word)


def test_a_value_that_no_word_names_is_refused():
    """An unused value is an error; otherwise it would be ignored silently."""
    with pytest.raises(ValueError, match="seed"):
        cli_task("train", "--root={root}", root="/r", seed="1")


@pytest.mark.parametrize("text", ["", "done", "[1]", "{"])
def test_a_last_line_that_is_no_object_is_an_error(text):
    """An invalid XCom fails in its own task, not in the next, with the line in the message."""
    with pytest.raises(HeadraceError, match="last line"):
        last_line(text)
    assert last_line('{"a": 1}') == {"a": 1}
