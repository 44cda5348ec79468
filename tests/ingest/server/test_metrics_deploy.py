"""The dashboard and the alert rules of docs/deploy name metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
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


ALERTED = {
    "HeadraceNotReady": ({"headrace_ready": "0x40"}, {}),
    "HeadraceShardsBehind": (
        {"headrace_steps_accepted_total": "200000x40", "headrace_steps_in_shards_total": "5x40"},
        {},
    ),
    "HeadraceCanaryEarnsLess": (
        {
            f'headrace_episode_return_{name}{{policy="p", role="{role}"}}': f"{value}x40"
            for role, returns in (("canary", (400, 40, 40)), ("live", (400, 200, 200)))
            for name, value in zip(("n", "sum", "sum_of_squares"), returns, strict=True)
        },
        {"policy": "p", "role": "canary"},
    ),
}
"""Alert -> (series, the alert's own labels)."""


def test_alerts_fire_and_are_silent(tmp_path: Path) -> None:
    """By Prometheus's own tool, where it is installed."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("expected promtool of Prometheus on the PATH")
    rules = DEPLOY / FILES[1]
    subprocess.run([tool, "check", "rules", str(rules)], check=True, capture_output=True)
    severities = dict(re.findall(r"- alert: (\w+)\n(?:.*\n)*?.*severity: (\w+)", rules.read_text()))
    summaries = dict(
        re.findall(r"- alert: (\w+)\n(?:.*\n)*?.*summary: \"(.*)\"", rules.read_text())
    )
    tests = []
    for alert, (series, labels) in ALERTED.items():
        for quiet in (False, True):
            given = {} if quiet and alert != "HeadraceCanaryEarnsLess" else dict(series)
            if quiet and given:  # as much as what is live
                given = {name: "200x40" if "_n" not in name else "400x40" for name in given}
            summary = summaries[alert].replace("{{ $labels.policy }}", labels.get("policy", ""))
            told = {
                "exp_labels": {"severity": severities[alert], **labels},
                "exp_annotations": {"summary": summary},
            }
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [
                        {"series": name, "values": values} for name, values in given.items()
                    ],
                    "alert_rule_test": [
                        {
                            "eval_time": "35m",
                            "alertname": alert,
                            "exp_alerts": [] if quiet else [told],
                        }
                    ],
                }
            )
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "tests": tests}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
