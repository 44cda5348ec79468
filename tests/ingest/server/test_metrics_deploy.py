"""The dashboard and the alert rules of docs/deploy use metrics that the collector exports."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from ingest.client.policy_client import PolicyClient
from policy.inference.weight_store import WeightStore
from storage.weights.lease import Lease
from tests.collector_process import CollectorProcess, declare
from tests.ingest.client.test_local_inference import publish
from tests.ingest.client.test_local_inference_canary import candidate, play

DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"
FILES = ("grafana.json", "alerts.yml")


METRIC = re.compile(r"\b(headrace_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
Samples = dict[str, list[dict[str, str]]]
"""Metric -> the labels of each of its samples."""


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Scrape a collector whose policy has every role, with a trainer and clients under flow
    control.
    """
    root = tmp_path_factory.mktemp("root")
    declare(root, steps_per_version=1000)
    for seed in (1, 2):
        publish(root, seed)
    store = WeightStore(root, "default")
    lease = Lease.take(store.files)
    lease.report({"rows_trained": 300, "excluded": {"stale": 7}})
    lease.release()
    store.start_canary(candidate(store, 3), 0.5)
    pause, found = threading.Event(), Samples()
    with CollectorProcess(root) as process:
        with PolicyClient(process.address) as client:
            for _ in range(20):
                play(client)
        while "headrace_training_excluded_rows" not in found:
            text = urllib3.request("GET", f"{process.address}/metrics").data.decode()
            found = {}
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append(dict(sample.labels))
            pause.wait(0.05)
    return found


def selected(expression: str, scrape: Samples) -> list[dict[str, str]]:
    """The labels used by an expression, each selector of which matches a sample."""
    labels = []
    for name, inside in METRIC.findall(expression):
        matchers = MATCHER.findall(inside)
        assert len(matchers) == len([one for one in inside.split(",") if one])
        patterns = {
            label: re.escape(value) if how == "=" else value.replace("$policy", "default")
            for label, how, value in matchers
        }
        matching = [
            sample
            for sample in scrape.get(name, ())
            if all(re.fullmatch(value, sample.get(key, "")) for key, value in patterns.items())
        ]
        assert matching, f"{name}{{{inside}}} finds nothing"
        labels += matching
    assert labels, expression
    return labels


def test_every_question_of_the_dashboard_has_an_answer(scrape: Samples) -> None:
    """This covers its metrics, the labels of its selectors and those in its legends."""
    dashboard = json.loads((DEPLOY / FILES[0]).read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(targets) > 20
    for target in targets:
        found = selected(target["expr"], scrape)
        shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert all(name in labels for labels in found for name in shown), target
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            assert asked
            assert all(asked[2] in labels for labels in selected(asked[1], scrape))


def test_every_alert_asks_for_what_there_is(scrape: Samples) -> None:
    """This covers its metrics, the labels that it selects and groups by, and those in its
    summary.
    """
    alerts = (DEPLOY / FILES[1]).read_text().split("- alert: ")[1:]
    assert len(alerts) > 10
    for alert in alerts:
        asked, rest = alert.split("expr:")[1].split("labels:", 1)
        found = selected(asked, scrape)
        grouped = {
            name.strip()
            for names in re.findall(r"(?:without|ignoring|by|on) \(([^)]*)\)", asked)
            for name in names.split(",")
        }
        lost = set(re.findall(r"without \((\w+)\)", asked))
        named = set(re.findall(r"\$labels\.(\w+)", rest))
        assert not named & lost, alert
        assert all(name in labels for labels in found for name in named | grouped), alert


def test_a_question_without_an_answer_is_found(scrape: Samples) -> None:
    """A misspelt metric, a label that it lacks, and a role that no version has are found."""
    for wrong in (
        "rate(headrace_events[5m])",
        'headrace_ready{policy=~"$policy"}',
        'headrace_episode_return_n{role="candidate"}',
    ):
        with pytest.raises(AssertionError, match="finds nothing"):
            selected(wrong, scrape)


def holds(expression: str, values: dict[tuple[str, str], float]) -> bool:
    """Compute an expression about one policy: (metric, role) -> value."""
    one = re.sub(r"\b(headrace_\w+)\{role=\"(\w+)\"\}", r'values["\1", "\2"]', expression)
    one = re.sub(r"ignoring \(role\)", "", one.replace(">-", "")).replace("^", "**")
    known = {"values": values, "sqrt": math.sqrt, "clamp_min": max}
    return bool(eval(" ".join(one.split()), known))  # noqa: S307 - our own file


def test_the_alert_on_reward_fires_for_a_worse_version_without_a_canary(tmp_path: Path) -> None:
    """Its expression, computed from the metrics of a collector whose clients earn by version: the
    second earns less than the first, the third as much as the second. A canary silences it."""
    text = (DEPLOY / FILES[1]).read_text().partition("- alert: HeadraceLiveEarnsLess")[2]
    expression = text.split("expr:")[1].split("for:")[0]
    declare(tmp_path)
    store, pause, fired = WeightStore(tmp_path, "default"), threading.Event(), []
    with CollectorProcess(tmp_path) as process, PolicyClient(process.address, "remote") as client:

        def scraped() -> dict[tuple[str, str], float]:
            text = urllib3.request("GET", f"{process.address}/metrics").data.decode()
            families = text_string_to_metric_families(text)
            samples = [sample for family in families for sample in family.samples]
            return {(one.name, one.labels.get("role", "")): one.value for one in samples}

        def scraped_once(metric: str, role: str, least: int) -> dict[tuple[str, str], float]:
            while (found := scraped())[metric, role] < least:
                pause.wait(0.05)
            return found

        for turn, reward in enumerate((1.0, 0.5, 0.5)):
            scraped_once("headrace_role_version", "live", publish(tmp_path, turn).version)
            for number in range(110):
                episode = client.start_episode()
                client.get_action(episode, [0.0] * 4)
                client.log_returns(episode, reward + number % 2 / 10)
                client.end_episode(episode)
            client.flush()
            found = scraped_once("headrace_episode_return_n", "live", 110)
            fired.append(turn > 0 and holds(expression, found))
            if turn == 1:
                store.start_canary(candidate(store, 9), 0.5)
                found = scraped_once("headrace_role_version", "canary", 1)
                assert found["headrace_episode_return_n", "previous"] == 110
                assert not holds(expression, found)
                store.rollback(by="ada")
                store.resume()
    assert fired == [False, True, False]


def test_the_dashboard_is_whole() -> None:
    """Each panel has its own place, a title and a query."""
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
    "HeadraceDiskFull": (
        {'headrace_disk_hours_left{folder="shards"}': "5x40"},
        {"folder": "shards"},
    ),
    "HeadraceNothingSealed": ({"headrace_steps_in_shards_total": "7x40"}, {}),
    "HeadraceImportStopped": (
        {'headrace_imported_steps_total{policy="p"}': "7x1700"},
        {"policy": "p"},
    ),
    "HeadraceEarnsLessThanBefore": (
        {
            **{
                f'headrace_episode_return_{name}{{policy="p", role="{role}"}}': f"{value}x40"
                for role, returns in (("live", (400, 40, 40)), ("before", (400, 200, 200)))
                for name, value in zip(("n", "sum", "sum_of_squares"), returns, strict=True)
            },
            'headrace_role_version{policy="p", role="canary"}': "-1x40",
        },
        {"policy": "p", "role": "live"},
    ),
    "HeadraceNotReady": ({"headrace_ready": "0x40"}, {}),
    "HeadraceShardsBehind": (
        {
            "headrace_steps_accepted_total": "200000x40",
            "headrace_steps_in_shards_total": "5x40",
            "headrace_steps_awaiting_rewards": "0x40",
        },
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
    "HeadraceLiveEarnsLess": (
        {
            **{
                f'headrace_episode_return_{name}{{policy="p", role="{role}"}}': f"{value}x40"
                for role, returns in (("live", (400, 40, 40)), ("previous", (400, 200, 200)))
                for name, value in zip(("n", "sum", "sum_of_squares"), returns, strict=True)
            },
            'headrace_role_version{policy="p", role="canary"}': "-1x40",
        },
        {"policy": "p", "role": "live"},
    ),
}
"""Alert -> (series, the alert's own labels)."""


def test_alerts_fire_and_are_silent(tmp_path: Path) -> None:
    """promtool, where it is installed, says that each alert fires for its series and is silent
    otherwise."""
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
            given = {} if quiet and "EarnsLess" not in alert else dict(series)
            if quiet and given:  # as much as the other version
                given |= {name: "200x40" for name in given if "_sum" in name}
            summary = summaries[alert]
            for name, value in labels.items():
                summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
            expected = {
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
                            "eval_time": "27h" if "Import" in alert else "35m",
                            "alertname": alert,
                            "exp_alerts": [] if quiet else [expected],
                        }
                    ],
                }
            )
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "tests": tests}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
