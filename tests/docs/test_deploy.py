"""docs/deploy: the commands of the container and the unit run, unchanged, in a folder."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import trustme
import urllib3

from headrace.__main__ import HELD, NOTHING_YET
from headrace.cli.learning import CANNOT_TELL_EXIT
from headrace.cli.options import INTERRUPTED
from headrace.cli.serving import NOT_SERVED
from ingest.access.key_files import create_token
from ingest.server.listening import TAKEN, TROUBLE, WRONG
from storage.system.files import FileLock
from tests.collector_process import declare

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "docs/deploy/headrace-collect.service"
IGNORED = ROOT / ".dockerignore"
LINES = (ROOT / "docs/deploy/Containerfile").read_text().replace("\\\n", "").splitlines()
STOP_SECONDS = 60.0


def words_of(instruction: str) -> list[str]:
    """The arguments of each occurrence of an instruction in the Containerfile."""
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{instruction} ")]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for text in words_of("ENV") for pair in shlex.split(text))


def run(words: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """`headrace` with these words, on a free port of loopback, reporting its address."""
    command = [sys.executable, "-m", "headrace", *words, "--port", "0", "--json"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def address_of(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("no output")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(process.communicate(timeout=STOP_SECONDS)[1])
    address: str = json.loads(line)["address"]
    return address


def test_what_the_container_copies_is_there() -> None:
    """Copied from the source: files of the repository. From the build stage: its outputs."""
    made = " ".join(words_of("RUN"))
    for text in words_of("COPY"):
        *options, source, _ = text.split()
        if options:
            assert options == ["--from=build"]
            assert f"venv {source} " in made
        else:
            assert (ROOT / source / "pyproject.toml").exists()
    assert all((ROOT / name).exists() for name in re.findall(r"-c (\S+)", made))


def test_what_the_container_is_built_from_makes_the_whole_wheel(tmp_path: Path) -> None:
    """.dockerignore admits only what the build needs: no environment, data or history."""
    ignored, *rules = [
        line for line in IGNORED.read_text().splitlines() if not line.startswith("#")
    ]
    assert ignored == "*"
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]
    assert not {".git", ".venv", "data", "tests", "docs"} & set(let_in)
    for name in let_in:
        whole = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        whole(ROOT / name, tmp_path / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]
    for source, made in ((tmp_path, tmp_path / "here"), (ROOT, tmp_path / "there")):
        subprocess.run([*build, str(made)], cwd=source, check=True, capture_output=True)
    here, there = (modules_in(tmp_path / name) for name in ("here", "there"))
    assert here == there
    assert "headrace/ingest/server/process.py" in here


def modules_in(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_containers_folder_is_its_users() -> None:
    """The volume is the collector's root, and belongs to the user that it runs as."""
    (user,) = (text.split(":")[0] for text in words_of("USER"))
    (volume,) = words_of("VOLUME")
    made = " ".join(words_of("RUN"))
    assert environment()["HEADRACE_ROOT"] == volume
    assert re.search(rf"install -d -o {user} .*{volume}$", made)
    assert f"--uid {user} " in made


def status_of(address: str, host: str) -> int:
    """The answer to a client that uses that host name."""
    trusting = urllib3.PoolManager(cert_reqs="CERT_NONE", retries=False)
    with warnings.catch_warnings(action="ignore"), trusting as pool:
        return pool.request("GET", f"{address}/healthz", headers={"host": host}).status


def test_the_containers_command_serves_and_its_health_check_sees_it(tmp_path: Path) -> None:
    """The container's command runs with a token and a certificate as its secret, and drains at its
    stop signal."""
    declare(tmp_path)
    create_token(tmp_path, "client", ["log"])
    pem = tmp_path / "tls.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    given = json.loads(words_of("ENTRYPOINT")[0])
    words = json.loads(words_of("CMD")[-1])
    assert given == ["headrace"]
    secret = words[words.index("--tls-cert") + 1]
    places = {secret: str(pem), "0.0.0.0": "127.0.0.1"}
    (name,) = re.findall(r"HEADRACE_COLLECT_ALLOW_HOST=(\S+)", "\n".join(LINES))
    env = {"HEADRACE_ROOT": str(tmp_path), "HEADRACE_COLLECT_ALLOW_HOST": f"other.example {name}"}
    process = run([places.get(word, word) for word in words], env)
    try:
        address = address_of(process)
        assert address.startswith("https://")
        check = json.loads(words_of("HEALTHCHECK")[0].partition("CMD ")[2])
        assert check[0] == "python"
        code = [sys.executable, *check[1:-1], check[-1].replace("https://127.0.0.1:8642", address)]
        assert subprocess.run(code, check=False).returncode == 0
        assert [status_of(address, host) for host in (name, "unknown.example")] == [200, 403]
        process.send_signal(signal.Signals[words_of("STOPSIGNAL")[0]])
        _, stderr = process.communicate(timeout=STOP_SECONDS)
        assert process.returncode == 0, stderr
        gone = subprocess.run(code, check=False, capture_output=True)
        assert gone.returncode != 0
    finally:
        process.kill()
        process.wait()


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd minds the case
    parser.read(UNIT)
    return parser


def test_the_unit_gives_up_at_wrong_usage_alone(tmp_path: Path) -> None:
    """After any other status the unit restarts the collector without limit, since errors of the
    disk, the system or other processes may end."""
    service = unit()["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("always", str(WRONG))
    assert unit()["Unit"]["After"] == unit()["Unit"]["Wants"] == "network-online.target"
    assert unit()["Unit"]["StartLimitIntervalSec"] == "0"
    declare(tmp_path)
    words = ["collect", "--root", str(tmp_path)]
    (tmp_path / "journal" / "lock").mkdir(parents=True)
    broken = run(words, {})
    broken.communicate(timeout=STOP_SECONDS)
    (tmp_path / "journal" / "lock").rmdir()
    with FileLock(tmp_path / "journal" / "lock"):
        taken = run(words, {})
        taken.communicate(timeout=STOP_SECONDS)
    assert (broken.returncode, taken.returncode) == (TROUBLE, TAKEN)


def test_the_page_tells_each_exit_status() -> None:
    """The table of the page, by which the unit decides on restarts, lists the program's exit
    statuses."""
    page = (ROOT / "docs/exit_statuses.md").read_text()
    statuses = re.findall(r"^\| (\d+) \| ", page.partition("Of `import`")[0], flags=re.MULTILINE)
    more = (NOT_SERVED, HELD, NOTHING_YET, 99, INTERRUPTED)
    ours = (0, TROUBLE, WRONG, TAKEN, CANNOT_TELL_EXIT, *more)
    assert statuses == [str(status) for status in ours]


def test_the_units_command_serves_and_stops_as_it_says(tmp_path: Path) -> None:
    """In another folder: status 0 after SIGTERM; wrong usage ends with the excluded status."""
    service = unit()["Service"]
    _, *words = shlex.split(service["ExecStart"])
    state = f"/var/lib/{service['StateDirectory']}"
    words = [word.replace(state, str(tmp_path)) for word in words]
    undeclared = run(words, {})
    undeclared.communicate(timeout=STOP_SECONDS)
    assert undeclared.returncode == int(service["RestartPreventExitStatus"])
    declare(tmp_path)
    process = run(words, {})
    try:
        assert address_of(process).startswith("http://127.0.0.1:")
        process.terminate()
        _, stderr = process.communicate(timeout=float(service["TimeoutStopSec"]))
        assert process.returncode == 0, stderr
    finally:
        process.kill()
        process.wait()
