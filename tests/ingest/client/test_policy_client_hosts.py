"""PolicyClient in its hosts: server workers, task queues, pools and notebooks, and at exit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import files
from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import ClientError
from tests.collector_process import CollectorProcess, declare, shard_rows

ROOT = Path(__file__).parents[3]
HOSTED = "tests.ingest.client.hosted_service"
PATIENCE = 60.0
GUNICORN = "gunicorn --bind 127.0.0.1:PORT --workers 2 --log-level warning"
UVICORN = "uvicorn --port PORT --log-level warning"


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    declare(tmp_path / "root")
    with CollectorProcess(tmp_path / "root") as running:
        yield running


def start(collector: CollectorProcess, words: list[str], **more: str) -> subprocess.Popen[bytes]:
    settings = {"COLLECTOR": collector.address, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", *words], env={**os.environ, **settings, **more}, cwd=ROOT
    )


def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(PATIENCE)
    finally:
        process.kill()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])


def call(port: str, name: str) -> str:
    """Return the process that answered, once there is one."""
    pause = threading.Event()
    for _ in range(6_000):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=PATIENCE) as got:
                return str(got.read().decode())
        except OSError:
            pause.wait(0.02)
    raise AssertionError(f"nobody answers for {name}")


def stored(collector: CollectorProcess) -> Counter[str]:
    """Count each episode's occurrences in the shards."""
    assert collector.stop() == 0
    return Counter(row["eps_id"] for row in shard_rows(collector.root))


@pytest.mark.parametrize(
    ("words", "preloads"),
    [
        (f"{GUNICORN} {HOSTED}:wsgi", False),
        pytest.param(f"{GUNICORN} --preload {HOSTED}:wsgi", True, marks=pytest.mark.long),
        (f"{GUNICORN} --preload --worker-class gthread --threads 4 {HOSTED}:wsgi", True),
        (f"{GUNICORN} --preload -k uvicorn_worker.UvicornWorker {HOSTED}:asgi", True),
        (f"{UVICORN} --workers 2 {HOSTED}:asgi", False),
        pytest.param(f"{UVICORN} {HOSTED}:asgi", False, marks=pytest.mark.long),
    ],
)
def test_workers_of_a_server_log_each_request_once(
    collector: CollectorProcess, words: str, preloads: bool
) -> None:
    """Workers are forked after the client's thread ran, or started afresh. A stop while the
    collector is frozen delivers what waits in the workers, and what the parent logged before it
    forked."""
    port, names = free_port(), [f"decision-{number}" for number in range(60)]
    settings = {"BUSY": "1"} if preloads else {}
    server = start(collector, words.replace("PORT", port).split(), **settings)
    with ThreadPoolExecutor(8) as callers:
        pids = Counter(callers.map(lambda name: call(port, name), names[:40]))
        os.kill(collector.serving_pid(), signal.SIGSTOP)
        pids += Counter(callers.map(lambda name: call(port, name), names[40:]))
    server.terminate()
    wake = threading.Timer(0.5, os.kill, (collector.serving_pid(), signal.SIGCONT))
    wake.start()
    status = ended(server)
    wake.join()
    assert status in (0, -signal.SIGTERM)  # uvicorn raises the signal that stopped it again
    found = stored(collector)
    before = [name for name in found if "preload" in name]
    assert found == Counter([*names, *before])
    assert len(before) == (50 if preloads else 0)
    assert sum(pids.values()) == 60


def test_workers_that_are_forked_without_hooks_log_each_request_once(
    collector: CollectorProcess,
) -> None:
    """uWSGI forks its workers without Python's fork hooks, after the client's thread ran. They log
    for themselves all the same. The collector is frozen until they run, so that the thread waits
    for it while they are forked. How uWSGI ends its workers is not our subject: they are killed."""
    port, names = free_port(), [f"decision-{number}" for number in range(40)]
    (program,) = [file.locate() for file in files("uwsgi") or () if file.name == "uwsgi"]
    words = [str(program), "--http-socket", f"127.0.0.1:{port}", "--master", "--processes", "2"]
    words += ["--enable-threads", "--virtualenv", sys.prefix, "--module", f"{HOSTED}:wsgi"]
    settings = {"COLLECTOR": collector.address, "PYTHONPATH": str(ROOT), "BUSY": "1", "IDLE": "1"}
    environment = {**os.environ, **settings}
    os.kill(collector.serving_pid(), signal.SIGSTOP)
    server = subprocess.Popen(words, env=environment, cwd=ROOT, start_new_session=True)
    try:
        call(port, "first")
        os.kill(collector.serving_pid(), signal.SIGCONT)
        with ThreadPoolExecutor(8) as callers:
            pids = Counter(callers.map(lambda name: call(port, name), names))
        collector.settle(50 + 1 + 40)
    finally:
        os.kill(collector.serving_pid(), signal.SIGCONT)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    found = stored(collector)
    before = [name for name in found if "preload" in name]
    assert found == Counter(["first", *names, *before])
    assert len(before) == 50
    assert sum(pids.values()) == 40


def test_a_task_queues_pool_delivers_before_it_ends(
    collector: CollectorProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's forked workers end by os._exit, without atexit or finalizers. A collector that is
    frozen for longer than they linger loses nothing."""
    for folder in ("queue", "control", "results"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("BROKER", str(tmp_path))
    words = f"celery -A {HOSTED} worker -c 2 -l error --without-gossip --without-mingle"
    worker = start(collector, words.split(), BUSY="1", PYTHONWARNINGS="ignore")
    from tests.ingest.client import hosted_service  # noqa: PLC0415 - it reads the environment

    app, names = hosted_service.queue_app(), [f"decision-{number}" for number in range(40)]
    sent = [app.send_task("decide", args=[name]) for name in names[:20]]
    for one in sent:
        one.get(timeout=PATIENCE)
    os.kill(collector.serving_pid(), signal.SIGSTOP)
    sent = [app.send_task("decide", args=[name]) for name in names[20:]]
    for one in sent:
        one.get(timeout=PATIENCE)
    worker.terminate()
    wake = threading.Timer(6.0, os.kill, (collector.serving_pid(), signal.SIGCONT))
    wake.start()
    assert ended(worker) == 0
    wake.join()
    found = stored(collector)
    assert {name: found[name] for name in names} == dict.fromkeys(names, 1)
    assert sum(found.values()) == 40 + 50


# --- programs --------------------------------------------------------------------------------


def run(
    collector: CollectorProcess, body: str, *words: str, status: int = 0, stdin: bool = False
) -> str:
    """Run a user's program, or type it in on `stdin`; return its stderr."""
    head = "import os, sys\nfrom headrace import PolicyClient\nOBS = [0.0] * 4\n"
    head += f"client = PolicyClient({collector.address!r})\n"
    code = head + textwrap.dedent(body)
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words, *([] if stdin else ["-c", code])],
        input=code if stdin else None,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stderr


SPAWNED = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from headrace import PolicyClient

client = PolicyClient(sys.argv[1])

def decide(number):
    client.log_step([0.0] * 4, 1, 1.0, episode_id=f"decision-{number}")

if __name__ == "__main__":
    context = get_context(sys.argv[2])
    decide("first")
    process = context.Process(target=decide, args=("alone",))
    process.start()
    process.join()
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        list(pool.map(decide, range(40)))
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long), "fork"]
)
def test_processes_however_they_start_log_each_decision_once(
    collector: CollectorProcess, tmp_path: Path, method: str
) -> None:
    """Each process, however it starts, has its own client and delivers its events at exit."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(program), collector.address, method]
    done = subprocess.run(words, env=environment, timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert stored(collector) == Counter(
        [f"decision-{name}" for name in ("first", "alone", *range(40))]
    )


def test_a_client_that_is_passed_to_a_process_says_what_to_do(collector: CollectorProcess) -> None:
    output = run(collector, "import pickle\npickle.dumps(client)", status=1)
    assert "TypeError: a PolicyClient cannot be pickled: make one in each process" in output


def test_a_notebook_logs_from_its_running_loop(collector: CollectorProcess) -> None:
    """Cells run on a loop that is blocked while they run (asyncio's REPL has the same model as
    ipykernel). A cell that is run again leaves the earlier client to deliver its queue."""
    body = """
    import asyncio
    def cell(number):
        client.log_step(OBS, 1, 1.0, episode_id=f"cell-{number}")

    for number in range(20): cell(number)

    client = PolicyClient(client._transport.address)
    await asyncio.gather(*(asyncio.to_thread(cell, number) for number in range(20, 40)))
    async def later(): cell(40); client.flush(60)

    await later()
    cell(41)
    """
    output = run(collector, body, "-m", "asyncio", stdin=True)
    assert "Error" not in output
    assert stored(collector) == Counter([f"cell-{number}" for number in range(42)])


LOG = "for i in range(500): client.log_step(OBS, 1, 1.0, episode_id=f'd{i}')\n"
ENDINGS = {
    "exit in a thread's flush": (
        "import threading\nthreading.Thread(target=client.flush).start()\nsys.exit(3)",
        3,
    ),
    "an error": ("raise ValueError('the service died')", 1),
    "interrupted": (  # a background job inherits that the signal is ignored
        "from signal import *\nsignal(SIGINT, default_int_handler)\nraise_signal(SIGINT)",
        -signal.SIGINT,
    ),
    "exit in a coroutine": (
        "import asyncio\nasync def main(): sys.exit(4)\n\nasyncio.run(main())",
        4,
    ),
    "a daemon goes on": (
        """import threading
def go():
    while True: client.start_episode()
threading.Thread(target=go, daemon=True).start()""",
        0,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_an_interpreter_that_ends_in_the_middle_delivers_what_was_logged(
    collector: CollectorProcess, name: str
) -> None:
    """This holds for every exit but os._exit and a signal that Python does not handle."""
    body, status = ENDINGS[name]
    run(collector, LOG + body, status=status)
    assert stored(collector) == Counter([f"d{number}" for number in range(500)])


def test_what_is_logged_after_the_client_has_ended_is_not_lost_in_silence(
    collector: CollectorProcess,
) -> None:
    """An exit handler registered before the import runs after the client's own."""
    late = "for i in range(3): client.log_step(OBS, 1, 1.0, episode_id=f'late-{i}')\n"
    program = "import atexit\ndef late():\n" + textwrap.indent(late + "{}", "    ")
    program += "\natexit.register(late)\nfrom headrace import PolicyClient\nOBS = [0.0] * 4\n"
    program += f"client = PolicyClient({collector.address!r})\nclient.start_episode()\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    counts = []
    for last in ("pass", "client.flush()"):
        words = [sys.executable, "-c", program.replace("{}", last)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        counts.append(done.stderr.count("only flush() and close() deliver"))
    assert counts == [1, 1]
    assert stored(collector)["late-2"] == 1


def test_a_thread_that_cannot_start_is_tried_again(collector: CollectorProcess) -> None:
    """A machine that is briefly out of threads fails that call only."""
    client = PolicyClient(collector.address)
    usual = threading.stack_size(2**46)  # exceeds the address space
    try:
        with pytest.raises(ClientError, match="the sending thread cannot be started"):
            client.start_episode()
    finally:
        threading.stack_size(usual)
    client.log_step([0.0] * 4, 1, 1.0, episode_id="later")
    client.close()
    assert stored(collector) == Counter(["later"])
