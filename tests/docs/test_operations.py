"""The reference pages and docs/deploy agree with the code."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import typer
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from ingest.web.limits import ServerLimits
from tests.collector_process import CollectorProcess, declare

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "docs/deploy/headrace-collect.service"
CONTAINER = ROOT / "docs/deploy/Containerfile"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def options_of_collect() -> set[str]:
    """The options of the command line, from its own help."""
    # the command line needs typer; no other test here does
    from headrace.__main__ import _command_line  # noqa: PLC0415 - see above

    command = typer.main.get_command(_command_line())
    return {word for option in command.commands["collect"].params for word in option.opts}


def unknown_options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")} - options_of_collect()


def test_every_limit_is_in_the_table_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page("limits.md"), re.MULTILINE))
    assert {name: float(text) for name, text in rows.items()} == {
        field.name: float(field.default)  # type: ignore[arg-type]  # each is a number
        for field in fields(ServerLimits)
    }


def test_every_metric_is_in_the_table(tmp_path: Path) -> None:
    """The table lists exactly the served metrics of ours; docs/ mentions no others."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        collector.post("/v1/episodes/nobody/end", {})
        collector.post("/v1/events", {"events": [{"type": "end", "episode_id": "nobody"}]})
        text = urllib3.request("GET", f"{collector.address}/metrics").data.decode()
    served = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if family.name.startswith("headrace_")
    }
    assert set(re.findall(r"^\| `(headrace_\w+)` \|", page("metrics.md"), re.MULTILINE)) == served
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert {name for page in pages for name in re.findall(r"`(headrace_\w+)", page)} == served


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd minds the case
    parser.read(UNIT)
    return parser


def test_the_unit_runs_as_somebody_without_privileges() -> None:
    """The unit has its own unprivileged user, and a command line that this version accepts."""
    service = unit()["Service"]
    assert service["User"] not in ("", "root", "0")
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    program, command, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("headrace", "collect")
    assert unknown_options(words) == set()
    assert f"/var/lib/{service['StateDirectory']}" in words
    assert unknown_options(["--no-such-option"]) == {"--no-such-option"}


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """If systemd is installed, it accepts the unit, given an existing program and user."""
    analyze = shutil.which("systemd-analyze")
    text = UNIT.read_text().replace("/opt/headrace/bin/headrace", sys.executable)
    path = tmp_path / UNIT.name
    path.write_text(re.sub(r"(?m)^(User|Group)=headrace$", r"\1=daemon", text))
    if analyze is not None:
        done = subprocess.run(
            [analyze, "verify", "--man=no", str(path)], capture_output=True, text=True
        )
        ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
        assert (done.returncode, ours) == (0, [])


def test_the_container_runs_as_somebody_without_privileges() -> None:
    """The image's last user is a number other than 0, and this version accepts its command."""
    text = CONTAINER.read_text().replace("\\\n", "")
    users = re.findall(r"^USER (\d+)", text, re.MULTILINE)
    assert users
    assert int(users[-1]) > 0
    last = text.rpartition("\nFROM ")[2]
    command, *words = json.loads(re.findall(r"^CMD (.*)$", last, re.MULTILINE)[-1])
    assert command == "collect"
    assert unknown_options(words) == set()
    copied = re.findall(r"-c (\S+)", text)
    assert all((ROOT / name).exists() for name in copied)
