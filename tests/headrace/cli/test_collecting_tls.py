"""`verify` and `ls` of a collector in the recommended setup: with tokens and TLS."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from urllib3 import PoolManager

from ingest.access.key_files import create_token
from tests.certificates import Certificates, certify
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace, refused

OBS = [0.5, 0.5, 0.5, 0.5]


@dataclass
class House:
    """A collector on every address, with an open episode; its certificate names none of them."""

    root: Path
    made: Certificates
    other: Certificates
    tokens: dict[str, str]

    def run(
        self, command: str, token: str | None, *words: object
    ) -> subprocess.CompletedProcess[str]:
        env = {} if token is None else {"HEADRACE_TOKEN": self.tokens[token]}
        return headrace(command, "--root", self.root, "--json", *words, env=env)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    root = folder / "root"
    declare(root)
    made = certify(folder / "made", "collector.example.com")
    tokens = {name: create_token(root, name, [name])[1] for name in ("log", "admin")}
    setting = House(root, made, certify(folder / "other"), tokens)
    with CollectorProcess(root, options=["--host", "0.0.0.0", *made.options]) as process:
        start = {"type": "start", "episode_id": "open"}
        step = {"type": "log_action", "episode_id": "open", "obs": OBS, "action": 1}
        local = f"https://localhost:{process.port}"
        headers = {"authorization": f"Bearer {tokens['log']}", "content-type": "application/json"}
        with PoolManager(ca_certs=str(made.ca), assert_hostname="collector.example.com") as pool:
            body = json.dumps({"events": [start, step]})
            done = pool.request("POST", f"{local}/v1/events", body=body, headers=headers)
        assert done.status == 200
        yield setting


def test_verify_asks_with_token_and_authority(house: House) -> None:
    """`verify` gets the collector's count of acknowledged steps with a token over TLS."""
    found = house.run("verify", "admin", "--ca", house.made.ca)
    assert (found.returncode, found.stderr) == (0, "")
    report = answer(found)
    assert (report["acknowledged"], report["in_journal"]) == (1, 1)


def test_the_authority_may_be_a_variable(house: House) -> None:
    """HEADRACE_CA, as for every command that calls a collector."""
    env = {"HEADRACE_TOKEN": house.tokens["admin"], "HEADRACE_CA": str(house.made.ca)}
    assert headrace("verify", "--root", house.root, env=env).returncode == 0


def test_open_episodes_are_shown_to_an_admin(house: House) -> None:
    """Only to an admin: otherwise `ls` says why not, and still lists the content of the root."""
    shown = answer(house.run("ls", "admin", "--ca", house.made.ca))
    assert (shown["open_episodes"], shown["why"]) == ({"default": 1}, "")
    for token, why in (("log", "needs a token with the scope admin"), (None, "expected a token")):
        hidden = answer(house.run("ls", token, "--ca", house.made.ca))
        assert hidden["open_episodes"] is None
        assert why in hidden["why"]


def test_a_certificate_of_another_authority_is_not_trusted(house: House) -> None:
    """With an untrusted certificate no token is sent, and the message names the problem."""
    for words in (("--ca", house.other.ca), ()):
        result = house.run("verify", "admin", *words)
        assert refused(result, "and cannot be asked: ")
        assert "certificate verify failed" in result.stderr
        hint = result.stderr.index("the server's certificate is not trusted: ")
        assert (
            hint
            < result.stderr.index("as --ca, HEADRACE_CA or ca= (")
            < result.stderr.index("_ssl.c")
        )
        assert "Max retries" not in result.stderr
