"""The dashboard and the alert rules of docs/deploy name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import urllib3

from tests.collector_process import CollectorProcess, declare

DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"
FILES = ("grafana.json", "alerts.yml")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every name that a scrape has; families without a sample yet have a line of their own."""
    root = tmp_path_factory.mktemp("root")
    declare(root)
    with CollectorProcess(root) as process:
        text = urllib3.request("GET", f"{process.address}/metrics").data.decode()
    names = set(re.findall(r"^(headrace_\w+)", text, re.MULTILINE))
    return names | set(re.findall(r"^# TYPE (headrace_\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", FILES)
def test_every_metric_that_is_named_exists(name: str, known: set[str]) -> None:
    named = set(re.findall(r"\bheadrace_\w+", (DEPLOY / name).read_text()))
    assert len(named) > 10
    assert named <= known, sorted(named - known)


def test_the_dashboard_is_whole() -> None:
    """Each panel has a place of its own, a title and something to ask."""
    dashboard = json.loads((DEPLOY / FILES[0]).read_text())
    panels = dashboard["panels"]
    places = {(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels}
    assert len(places) == len(panels) == len({one["id"] for one in panels})
    for one in panels:
        assert one["title"]
        assert all(target["expr"] for target in one["targets"])


def test_each_alert_says_what_is_wrong() -> None:
    text = (DEPLOY / FILES[1]).read_text()
    alerts = re.findall(r"- alert: (\w+)", text)
    assert len(alerts) == len(set(alerts)) == text.count("expr:") == text.count("summary:")
    brackets = [text.count(pair) for pair in "()[]{}"]
    assert brackets[::2] == brackets[1::2]
