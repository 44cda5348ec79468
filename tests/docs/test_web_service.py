"""docs/web_service.md and examples/service: the ledger after kills, and the Kubernetes manifest."""

from __future__ import annotations

import ast
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from headrace import PolicyClient
from tests.certificates import certify
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.docs.test_docs import blocks, run_shell
from tests.headrace.command import headrace

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/service"
PATIENCE = 60.0
BLOCKS, BLOCK, CALLERS = 3, 80, 8  # something is killed in each block of decisions
FEATURES = [0.1, 0.2, 0.3, 0.4]
WINDOW = 3600.0  # the reward window in seconds of running time, longer than any test
HTTP = urllib3.PoolManager(retries=False, timeout=PATIENCE, maxsize=CALLERS)


def until(made: Callable[[], Any]) -> Any:
    """Retry `made` until it returns something without an HTTP error."""
    pause = threading.Event()
    for _ in range(3000):
        try:
            if found := made():
                return found
        except urllib3.exceptions.HTTPError:
            pass
        pause.wait(0.02)
    raise AssertionError("nothing came")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def running(words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    options["env"] = {**os.environ, **options.get("env", {})}
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def workers(server: subprocess.Popen[str]) -> list[int]:
    """The processes of uvicorn's workers."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def close_windows(collector: CollectorProcess, steps: int, *spaces: str) -> None:
    """Restart a collector with an expired window, so that all steps go to shards."""
    assert collector.stop() == 0
    declare(collector.root, *spaces, reward_window=0.001)
    collector.restart()
    collector.settle(steps)


def decide(address: str, name: str) -> int:
    """Repeat a caller's request until it is answered."""

    def ask() -> int | None:
        body = {"request_id": name, "features": FEATURES}
        answer = HTTP.request("POST", f"{address}/decide", json=body)
        assert answer.status in (200, 503), answer.data
        return answer.json()["action"] + 1 if answer.status == 200 else None

    return int(until(ask)) - 1


class Clicks:
    """The consumer of clicks and its queue, which repeats uncommitted lines after a kill."""

    def __init__(self, address: str, wait: float = 60.0) -> None:
        self.lines: list[str] = []
        self.committed = 0
        self._env = {"HEADRACE_ADDRESS": address, "HEADRACE_WAIT": str(wait)}

    def click(self, name: str) -> None:
        """Add a click to the queue; every other click is reported twice."""
        line = json.dumps({"request_id": name, "click_id": f"click-of-{name}"}) + "\n"
        self.lines += [line, line] if name.endswith("0") else [line]

    def consume(self, *, kill: bool) -> None:
        """Pass lines to the consumer; with `kill` it dies after its first commit."""
        words, pipe = ["examples.service.clicks"], subprocess.PIPE
        with running(words, env=self._env, stdin=pipe, stdout=pipe) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            first = self.committed
            process.stdin.write("".join(self.lines[first:]))
            process.stdin.flush()
            if kill:
                self.committed = first + int(process.stdout.readline())
                process.kill()
            else:
                process.stdin.close()
                for line in process.stdout:
                    self.committed = first + int(line)
                assert process.wait(PATIENCE) == 0


def test_kills_lose_no_decision_and_no_click_and_double_none(tmp_path: Path) -> None:
    """Collector, workers and the consumer are killed by SIGKILL while callers repeat their requests
    until answered. At the end: decisions = rows, with the answered action; clicks = rewards.
    """
    declare(tmp_path, reward_window=WINDOW)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    names = [f"request-{number}" for number in range(BLOCKS * BLOCK)]
    answered: dict[str, int] = {}
    with CollectorProcess(tmp_path) as collector:
        clicks = Clicks(collector.address)
        environment = {
            "HEADRACE_ADDRESS": collector.address,
            "HEADRACE_CACHE": str(tmp_path / "cache"),
        }
        words = f"uvicorn --port {port} --workers 3 --log-level error examples.service.app:app"
        with (
            running(words.split(), env=environment) as server,
            ThreadPoolExecutor(CALLERS) as callers,
        ):
            until(lambda: HTTP.request("GET", f"{address}/healthz").status == 200)
            for block in range(BLOCKS):
                some = names[block * BLOCK : (block + 1) * BLOCK]
                asked = callers.map(lambda name: decide(address, name), some)
                until(lambda: HTTP.request("GET", f"{address}/healthz").status == 200)
                for pid in workers(server)[: block % 3]:
                    os.kill(pid, signal.SIGKILL)
                if block % 2:
                    collector.kill()
                    collector.restart()
                if clicks.lines:
                    clicks.consume(kill=block % 2 == 0)
                answered.update(zip(some, asked, strict=True))
                for name in some[::3]:
                    clicks.click(name)
        clicks.consume(kill=False)
        assert clicks.committed == len(clicks.lines)
        clicked = {json.loads(line)["request_id"] for line in clicks.lines}
        close_windows(collector, len(names))
        clicks.click(names[1])  # a late click does not hold up the consumer
        clicks.consume(kill=False)
        assert clicks.committed == len(clicks.lines)
        assert collector.stop() == 0
    rows = shard_rows(tmp_path)
    assert Counter(row["eps_id"] for row in rows) == Counter(names)
    assert {row["eps_id"]: row["actions"] for row in rows} == answered
    assert {row["eps_id"] for row in rows if row["rewards"]} == clicked
    assert sum(row["rewards"] for row in rows) == len(clicked)
    assert headrace("verify", "--root", tmp_path).returncode == 0


def test_a_click_waits_for_its_decision_and_one_without_holds_up_nobody(tmp_path: Path) -> None:
    """A click is sent again while its decision may still be in a worker's spool. Clicks that are
    never accepted (for an unknown request, or invalid lines) are printed, in any order."""
    declare(tmp_path, reward_window=WINDOW)
    refusal = b'headrace_refused_events_total{code="not_found"}'
    with CollectorProcess(tmp_path) as collector, PolicyClient(collector.address) as client:
        early, others = Clicks(collector.address), Clicks(collector.address, wait=0)
        early.click("late-decision")
        with ThreadPoolExecutor(1) as thread:
            consumed = thread.submit(early.consume, kill=False)
            until(lambda: refusal in HTTP.request("GET", f"{collector.address}/metrics").data)
            client.log_step(FEATURES, 1, 0.0, episode_id="late-decision")
            client.log_step(FEATURES, 1, 0.0, episode_id="decision")
            client.flush(PATIENCE)
            consumed.result(PATIENCE)
        assert early.committed == 1
        others.click("nobody's")
        others.lines += ["no click\n", "[]\n"]
        others.click("decision")
        others.consume(kill=False)
        assert others.committed == len(others.lines) == 4
        close_windows(collector, 2)
        assert collector.stop() == 0
    assert [row["rewards"] for row in shard_rows(tmp_path)] == [1.0, 1.0]


def test_the_page_can_be_tried(tmp_path: Path) -> None:
    """The page's commands, with this test's ports: one decision, requested twice, and one click."""
    (commands,) = [text for text in blocks("docs/web_service.md", "text") if "uvicorn" in text]
    collect, serve = map(shlex.split, commands.splitlines())
    port = free_port()
    spaces = [collect[collect.index(name) + 1] for name in ("--observation", "--action")]
    declare(tmp_path, *spaces, reward_window=WINDOW)
    (code,) = blocks("docs/web_service.md", "sh")
    with CollectorProcess(tmp_path) as collector:
        environment = {"HEADRACE_ADDRESS": collector.address, "PYTHONPATH": str(ROOT)}
        environment["SERVICE"] = f"http://127.0.0.1:{port}"
        with running([*serve, "--port", str(port)], env=environment):
            until(lambda: HTTP.request("GET", f"{environment['SERVICE']}/healthz").status == 200)
            names = " ".join(f"{name}={value}" for name, value in environment.items())
            code = code.replace("| python", f"| {sys.executable}")
            first, second, clicks = run_shell(f"export {names}\n{code}", tmp_path, collector)
            for feature in ("1e39", "1e999"):  # beyond float32, beyond JSON's usual numbers
                body = f'{{"request_id": "big-{feature}", "features": [{feature}, 0, 0, 0]}}'
                told_of = {"content-type": "application/json"}
                address = f"{environment['SERVICE']}/decide"
                for _ in range(2):  # also once the worker knows what is declared
                    answer = HTTP.request("POST", address, body=body, headers=told_of)
                    assert answer.status == 422, answer.data
        assert json.loads(first) == json.loads(second)
        assert clicks == "1"
        close_windows(collector, 1, *spaces)
        assert collector.stop() == 0
    assert [row["rewards"] for row in shard_rows(tmp_path)] == [1.0]


def test_a_spool_answers_without_the_collector_and_loses_nothing(tmp_path: Path) -> None:
    """Workers are killed while the collector is absent; the next ones deliver the answered
    decisions, and any later process with the folder delivers the rest."""
    declare(tmp_path, reward_window=WINDOW)
    port, spool = free_port(), tmp_path / "spool"
    address = f"http://127.0.0.1:{port}"
    answered: dict[str, int] = {}
    with CollectorProcess(tmp_path) as collector:
        environment = {
            "HEADRACE_ADDRESS": collector.address,
            "HEADRACE_CACHE": str(tmp_path / "cache"),
        }
        words = f"uvicorn --port {port} --workers 2 --log-level error examples.service.app:app"
        env = environment | {"HEADRACE_SPOOL": str(spool)}
        with running(words.split(), env=env) as server, ThreadPoolExecutor(CALLERS) as callers:
            until(lambda: HTTP.request("GET", f"{address}/healthz").status == 200)
            for block in range(3):
                if block % 2:
                    collector.kill()
                names = [f"request-{block}-{number}" for number in range(60)]
                asked = callers.map(lambda name: decide(address, name), names)
                answered.update(zip(names, asked, strict=True))
                for pid in workers(server)[: 1 + block % 2]:
                    os.kill(pid, signal.SIGKILL)
                if block % 2:
                    collector.restart()
        with PolicyClient(collector.address, on_full="spool", spool_dir=spool) as client:
            client.flush(PATIENCE)
        assert [path.name for path in spool.iterdir()] == ["lock"]
        clicks = Clicks(collector.address)
        for name in list(answered)[::3]:
            clicks.click(name)
        clicks.consume(kill=False)
        close_windows(collector, len(answered))
        assert collector.stop() == 0
    rows = shard_rows(tmp_path)
    assert {row["eps_id"]: row["actions"] for row in rows} == answered
    assert len(rows) == len(answered)
    assert sum(row["rewards"] for row in rows) == len(answered) / 3


def test_the_examples_import_from_headrace_alone() -> None:
    """The example imports only public names of Headrace."""
    for file in EXAMPLE.glob("*.py"):
        tree = ast.parse(file.read_text())
        found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "headrace" in found
        assert not [name for name in found if str(name).startswith(("headrace.", "ingest", "poli"))]


# --- Kubernetes ------------------------------------------------------------------------------


def manifest(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text())
    return next(document for document in documents if document["kind"] == kind)


def container(kind: str) -> dict[str, Any]:
    """The one container of an object."""
    spec = manifest(kind)["spec"]
    spec = spec.get("jobTemplate", {"spec": spec})["spec"]
    (found,) = spec["template"]["spec"]["containers"]
    return dict(found)


def placed(words: list[str], **places: object) -> list[str]:
    for name, place in places.items():
        words = [word.replace(name.replace("__", "/"), str(place)) for word in words]
    return words


def probe(kind: str, port: int) -> list[str]:
    """The URLs of a container's probes."""
    found = []
    for name in ("livenessProbe", "readinessProbe"):
        asked = container(kind)[name]["httpGet"]
        found.append(f"{asked.get('scheme', 'http').lower()}://127.0.0.1:{port}{asked['path']}")
    return found


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")  # as kubelet does
def test_what_kubernetes_is_told_runs(tmp_path: Path) -> None:
    """The manifest's commands with a test's paths: probes answer, the service decides, and the
    nightly import of the same file adds nothing the second time."""
    root, tls = tmp_path / "root", certify(tmp_path / "tls", "127.0.0.1")
    pem = tmp_path / "tls.pem"
    pem.write_bytes(tls.cert.read_bytes() + tls.key.read_bytes())
    made = headrace("token", "create", "service", "--root", root, "--scope", "log")
    port, own = free_port(), free_port()
    places = {"__var__lib__headrace": root, "__run__secrets__tls__tls.pem": pem}
    words = placed(container("StatefulSet")["args"], **places)
    words[words.index("8642")] = str(port)
    words[words.index("0.0.0.0")] = "127.0.0.1"
    environment = {
        "HEADRACE_ADDRESS": f"https://127.0.0.1:{port}",
        "HEADRACE_CA": str(tls.ca),
        "HEADRACE_TOKEN": made.stdout.split()[-1],
        "HEADRACE_CACHE": str(tmp_path / "cache"),
    }
    assert {*manifest("ConfigMap")["data"], "HEADRACE_TOKEN"} == set(environment)
    serve = placed(container("Deployment")["command"])
    serve[serve.index("8000")], serve[serve.index("0.0.0.0")] = str(own), "127.0.0.1"
    export = tmp_path / "yesterday.csv"
    lines = [f"{n % 5},{n},1,{n % 24},{n % 2},1,0.5,order-{n}" for n in range(30)]
    head = "age,visits,basket,hour,offer,bought,probability,order"
    export.write_text("\n".join([head, *lines]) + "\n")
    nightly = placed(container("CronJob")["args"], **{"__exports__yesterday.csv": export})
    blind = urllib3.PoolManager(cert_reqs="CERT_NONE", retries=False)
    with running(["headrace", *words], stdout=subprocess.DEVNULL), running(serve, env=environment):
        for address in (*probe("StatefulSet", port), *probe("Deployment", own)):
            until(lambda address=address: blind.request("GET", address).status == 200)
        assert decide(f"http://127.0.0.1:{own}", "first") in (0, 1)
        metrics = HTTP.request("GET", f"http://127.0.0.1:{own}/metrics").data
        assert b"headrace_client_events_acknowledged_total" in metrics
        runs = [headrace(*nightly, "--json", env=environment) for _ in range(2)]
    assert [run.stderr for run in runs] == ["", ""]
    assert [json.loads(run.stdout)["steps"] for run in runs] == [30, 0]
