"""`headrace collect`: first steps, declarations, and its end.

Also of `ingest.server.declare`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import urllib3

from ingest.access.key_files import create_token
from ingest.server.declare import declaration_of
from ingest.server.options import DeclaringSpaces
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.spaces.descriptors import Discrete, MultiDiscrete, parse_space
from tests.certificates import certify
from tests.headrace.command import Collect, answer, headrace, refused

SPACES = ("--observation", "box:4", "--action", "discrete:2")
PATIENCE = 60.0


def post(url: str, body: object) -> int:
    """The status of a JSON request: by curl, as in the guide, if it is installed."""
    curl = shutil.which("curl")
    text = json.dumps(body)
    if curl is None:
        return urllib3.request("POST", url, json=body, retries=False).status
    words = [curl, "-s", "-o", "/dev/null", "-w", "%{http_code}", "--json", text, url]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def test_the_first_hour(tmp_path: Path) -> None:
    """Spaces in two options, three steps by curl, a shard soon after, plain pandas reads it."""
    with Collect(tmp_path / "run", *SPACES) as collect:
        address = collect.first_line.split()[2]
        episodes = f"{address}/v1/episodes"
        assert post(episodes, {"episode_id": "first"}) == 201
        for t in range(3):
            step = {"obs": [0.1, 0.2, 0.3, t], "action": t % 2, "reward": 1.5}
            assert post(f"{episodes}/first/log_action", step) == 200
        assert post(f"{episodes}/first/end", {}) == 200
        ended, pause, found = time.monotonic(), threading.Event(), []
        while not found and time.monotonic() - ended < PATIENCE:
            found = list((tmp_path / "run" / "shards").glob("*/[!.]*.parquet"))
            pause.wait(0.05)
        frame = pd.read_parquet(found[0])
    assert frame["actions"].tolist() == [0, 1, 0]
    assert frame["rewards"].tolist() == [1.5] * 3
    assert [row.tolist() for row in frame["obs"]] == [
        pytest.approx([0.1, 0.2, 0.3, t]) for t in range(3)
    ]
    assert frame["ended"].isna().tolist() == [True, True, False]
    assert frame["ended"].iloc[-1] == "terminated"
    assert headrace("verify", "--root", tmp_path / "run").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    """When it stops, ended episodes are in shards, and the status is 0."""
    with Collect(tmp_path, *SPACES) as collect:
        episodes = f"{collect.first_line.split()[2]}/v1/episodes"
        post(episodes, {"episode_id": "one"})
        post(f"{episodes}/one/log_action", {"obs": [0, 0, 0, 0], "action": 1})
        post(f"{episodes}/one/end", {})
        out, err, status = collect.stop(number)
    assert (status, err) == (0, "")
    assert "curl --json" in collect.greeting[0]
    assert out == "Stopped: 1 step acknowledged so far, 1 in shards.\n"


def test_the_first_request_has_what_the_collector_requires(tmp_path: Path) -> None:
    """A token once one was made, and the authority of a certificate."""
    made = certify(tmp_path / "certificates", "localhost")
    create_token(tmp_path / "run", "web", ["log"])
    with Collect(tmp_path / "run", *SPACES, *map(str, made.options)) as collect:
        assert "curl --cacert CA.pem" in collect.greeting[0]
        assert '-H "Authorization: Bearer $HEADRACE_TOKEN" --json' in collect.greeting[0]


def test_the_first_request_names_a_policy_if_it_must(tmp_path: Path) -> None:
    """With several policies, none of them `default`, a start without a policy would be refused."""
    spaces = {"observation": parse_space("box:4"), "action": parse_space("discrete:2")}
    for name in ("news", "session"):
        save_declaration(tmp_path, PolicyDeclaration(policy_id=name, **spaces))
    with Collect(tmp_path) as collect:
        episodes = f"{collect.first_line.split()[2]}/v1/episodes"
        (body,) = re.findall(r"--json '(.*)'", collect.greeting[0])
        assert post(episodes, json.loads(body)) == 201
        assert post(episodes, {"episode_id": "second"}) == 422


def test_json_is_one_line_when_it_is_ready(tmp_path: Path) -> None:
    """A program that starts a collector reads only its address from stdout."""
    with Collect(tmp_path, *SPACES, "--json") as collect:
        document = json.loads(collect.first_line)
        assert document["pid"] == collect.process.pid
        assert urllib3.request("GET", document["address"] + "/readyz").status == 200
        assert collect.stop() == ("", "", 0)


def test_without_spaces_it_says_how_to_give_them(tmp_path: Path) -> None:
    """Without a declaration or an option, the error names every form."""
    result = headrace("collect", "--root", tmp_path)
    assert refused(result, "--observation box:4 --action discrete:2", "--env", "--policy FILE")


def test_spaces_are_declared_once(tmp_path: Path) -> None:
    """A later start needs no spaces; different ones need --redeclare, which the error names, and
    keep the other settings."""
    with Collect(tmp_path, *SPACES) as collect:
        assert collect.stop()[2] == 0
    path = tmp_path / "policies" / "default.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "seal_seconds": 1.5}))
    with Collect(tmp_path) as collect:
        assert collect.stop()[1:] == ("", 0)
    with Collect(tmp_path, *SPACES) as collect:
        assert collect.stop()[1:] == ("", 0)
    other = ("--observation", "box:4", "--action", "discrete:3")
    refusal = headrace("collect", "--root", tmp_path, *other)
    assert refused(refusal, str(tmp_path), "Discrete(2)", "Discrete(3)", "--redeclare")
    assert load_declarations(tmp_path)["default"].action == Discrete(2)
    with Collect(tmp_path, *other, "--redeclare") as collect:
        _, err, status = collect.stop()
    assert status == 0
    assert "policy default: action was" in err
    assert "episodes that are open keep the old" in err
    assert "observation" not in err
    declared = load_declarations(tmp_path)["default"]
    assert (declared.action, declared.seal_seconds) == (Discrete(3), 1.5)


def test_a_reward_window_is_declared_with_the_spaces_or_later(tmp_path: Path) -> None:
    """A start without --reward-window keeps the old one; the option needs a declared policy."""
    assert refused(headrace("collect", "--root", tmp_path, "--reward-window", "60"), "got none")
    for words, window in (((*SPACES, "--reward-window", "60"), 60.0), (SPACES, 60.0),
                          (("--reward-window", "3600"), 3600.0)):  # fmt: skip
        with Collect(tmp_path, *words) as collect:
            assert collect.stop()[2] == 0
        assert load_declarations(tmp_path)["default"].reward_window == window
    wrong = headrace("collect", "--root", tmp_path, "--reward-window", "-1")
    assert refused(wrong, "reward_window: expected a finite number >= 0, got -1.0")


def test_a_reward_range_is_declared_with_the_spaces_or_later(tmp_path: Path) -> None:
    """A start without --reward-range keeps the old one; the option needs a declared policy."""
    refusal = headrace("collect", "--root", tmp_path, "--reward-range", "0", "1")
    assert refused(refusal, "--reward-range: expected one policy", "got none")
    for words, limits in (((*SPACES, "--reward-range", "0", "1"), (0.0, 1.0)), (SPACES, (0.0, 1.0)),
                          (("--reward-range", "-1", "2.5"), (-1.0, 2.5))):  # fmt: skip
        with Collect(tmp_path, *words) as collect:
            _, err, status = collect.stop()
        assert status == 0
        assert load_declarations(tmp_path)["default"].reward_range == limits
    assert err == "policy default: reward_range was [0.0, 1.0], is now [-1.0, 2.5]\n"
    wrong = headrace("collect", "--root", tmp_path, "--reward-range", "1", "0")
    assert refused(wrong, "reward_range: expected [low, high]", "low < high", "got (1.0, 0.0)")


def test_an_environment_gives_its_spaces(tmp_path: Path) -> None:
    """`--env` takes the spaces of a gymnasium environment."""
    with Collect(tmp_path, "--env", "CartPole-v1") as collect:
        assert collect.stop()[2] == 0
    declared = load_declarations(tmp_path)["default"]
    assert declared.action == Discrete(2)
    assert declared.observation.shape == (4,)  # type: ignore[union-attr]  # CartPole's is a Box


def test_only_the_option_of_an_environment_needs_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector's extra does not install gymnasium, and spaces in words do not need it."""
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(DeclarationError, match=r"--env needs gymnasium, .*or give --observation"):
        declaration_of(DeclaringSpaces(env="CartPole-v1"))


def test_a_policy_file_is_taken_whole(tmp_path: Path) -> None:
    """`--policy` sets every field, under the file's policy id."""
    policy = PolicyDeclaration(
        policy_id="shop",
        observation=MultiDiscrete((3, 4)),
        action=parse_space("discrete:9"),
        episode_timeout=5.0,
    )
    file = tmp_path / "shop-policy.json"
    file.write_text(json.dumps(policy.to_json()))
    with Collect(tmp_path / "run", "--policy", str(file)) as collect:
        assert "for shop." in collect.first_line
        assert collect.stop()[2] == 0
    assert load_declarations(tmp_path / "run") == {"shop": policy}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--observation", "box:4"), "--action together"),
        (("--observation", "bax:4", "--action", "discrete:2"), "box:SHAPE"),
        ((*SPACES, "--env", "CartPole-v1"), "expected one of"),
        (("--env", "NoSuchEnv-v0"), "NoSuchEnv"),
        (
            ("--policy", "no/such.json"),
            "--policy: expected a policy file, got no/such.json: No such",
        ),
        (
            ("--observation", "box:4", "--action", "discrete:[a,b]"),
            "--action: expected names as JSON",
        ),
        ((*SPACES, "--host", "0.0.0.0"), "not loopback"),
        ((*SPACES, "--compression", "gzip"), "zstd or lz4"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    """A message with the expected value, status 2, no traceback."""
    assert refused(headrace("collect", "--root", tmp_path, *words), text)


def test_a_second_collector_is_refused(tmp_path: Path) -> None:
    """One root, one collector: the second names the first."""
    with Collect(tmp_path, *SPACES) as collect:
        second = headrace("collect", "--root", tmp_path, "--port", "0")
        assert refused(second, f"process {collect.process.pid}", status=3)
        for command in ("collect", "up"):
            other = ("--observation", "box:5", "--action", "discrete:2", "--redeclare")
            third = headrace(command, "--root", tmp_path, "--port", "0", *other)
            assert refused(third, f"process {collect.process.pid}", status=3)
        (declared,) = load_declarations(tmp_path).values()
        assert declared.observation == parse_space("box:4")


@pytest.mark.parametrize("command", ["collect", "collect --supervise", "up"])
def test_a_start_that_gets_no_address_declares_nothing(tmp_path: Path, command: str) -> None:
    """A taken port leaves a new root as it was, so that the next start may have other spaces."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = headrace(*command.split(), "--root", tmp_path, *SPACES, "--port", port)
    assert refused(result, f"cannot bind 127.0.0.1:{port}", status=3)
    assert not (tmp_path / "policies").exists()


def test_every_option_is_an_environment_variable(tmp_path: Path) -> None:
    """Shared ones have one name; the command's own carry its name."""
    env = {
        "HEADRACE_ROOT": str(tmp_path / "run"),
        "HEADRACE_COLLECT_OBSERVATION": "box:4",
        "HEADRACE_COLLECT_ACTION": "discrete:2",
        "HEADRACE_COLLECT_PORT": "0",
    }
    spaces = {"observation": parse_space("box:4"), "action": parse_space("discrete:3")}
    save_declaration(tmp_path / "run", PolicyDeclaration(**spaces))
    assert refused(headrace("collect", env=env), "got observation Box", "Discrete(2)")
    listed = headrace("ls", env={**env, "HEADRACE_JSON": "1"})
    assert answer(listed)["policies"] == ["default"]


def test_a_second_collector_is_told_where_the_first_one_is(tmp_path: Path) -> None:
    """On the same root it ends with status 3, and names the process and the address."""
    with Collect(tmp_path, *SPACES, "--json") as collect:
        document = json.loads(collect.first_line)
        result = headrace("collect", "--root", tmp_path, "--port", 0)
        named = (f"process {document['pid']}", f"serves {document['address']}")
        assert refused(result, *named, status=3)
        assert collect.stop()[2] == 0


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_is_none_is_refused(tmp_path: Path, port: str) -> None:
    """Status 2; the system would take it modulo 65,536."""
    result = headrace("collect", "--root", tmp_path, "--port", port, "--observation", "box:1")
    assert (result.returncode, "--port" in result.stderr) == (2, True)
    assert not (tmp_path / "journal").exists()
