"""The report: one file, usable offline, with a complete overview."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headrace.output.report_page import report_page
from policy.data.overview import overview
from policy.judging.canary import promote, start_canary
from policy.judging.gate import publish
from policy.judging.settings import Gate
from storage.experience.reward_history import RewardHistory
from tests.policy.judging.test_canary import EQUAL, SHARE, Traffic
from tests.policy.judging.test_evaluate_verdicts import probabilities, stored, uniform_log

HOUR = 3_600_000_000


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_what_was_logged_learned_and_decided_is_in_it(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path)
    traffic.log(300, EQUAL)
    start_canary(tmp_path, "default", traffic.candidate(2), SHARE)
    traffic.log(1000, {True: 0.8, False: 0.2})
    promote(tmp_path, "default")
    traffic.store.rollback(why="complaints")
    page = report_page(overview(tmp_path, "default"))
    text = text_of(page)
    for part in (
        "Version 3 is live",
        "1,300 steps",
        "1,300 0",  # the ends of an axis
        "default : reward per decision",
        "version 3, live",
        "Steps by version",
        "Steps by source",
        "better",
        "Version 2 in 0.3 of the episodes, compared with version 1",
        "returns 0.8",
        "failures 0 0 0",
        "rollback",
        "publish --canary",
        "version 2 acts in 0.3 of the episodes",
        "promote",
        "live as version 3 rolled back from version 2 to the content of 1 complaints by a",
    ):
        assert part in text, part
    assert page.count("<rect") >= 3
    assert not re.search(r"(?:src|href)\s*=|<script|@import|url\(", page), "it opens offline"


def test_a_decision_has_the_tables_of_its_evaluation(tmp_path: Path) -> None:
    """The page shows what the terminal does: differences, checks with their thresholds, estimates,
    rows left out."""
    uniform_log(tmp_path, [0.5, 0.5, 0.5, 0.5], n=1000)
    publish(tmp_path, "default", stored(tmp_path, probabilities(0.97, *[0.01] * 3)), Gate())
    text = text_of(report_page(overview(tmp_path, "default")))
    for part in (
        "cannot tell",
        "Decisive differences: value per episode, weights minus bar",
        "log check value has to be in words",
        "mean importance weight 0.",
        "about 1",
        "effective sample size",
        "at least 100",
        "share of the largest weight",
        "log estimate value per episode 95% interval ESS episodes excluded",
        "snips of the weights",
        f"{tmp_path.name} the logging policy",
        "The interval of dm ignores",
    ):
        assert part in text, part
    assert not re.search(r"mean_weight|_sample_size|unsupported_|largest_", text), "names of --json"


def document(**changes: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "root": "/r",
        "policy_id": "p",
        "made": 0,
        "history": RewardHistory(),
        "data": {"bars": [], "steps": 0, "skipped": {}, "why": None},
        "live": None,
        "served": [],
        "versions": [],
        "damaged": {},
        "decisions": [],
    }
    return empty | changes


def test_nothing_is_a_page_too() -> None:
    text = text_of(report_page(document(damaged={"live.json": "<damaged>"})))
    for part in ("Nothing is live", "No steps", "No versions", "Nothing was decided"):
        assert part in text
    assert "&lt;damaged&gt;" in text


def test_curves_have_their_versions_and_their_number() -> None:
    """Curves of changing numbers, without settings, constants and metrics of only one version."""
    versions = [
        {
            "version": n,
            "metrics": {
                "loss": 1.0 / n,
                "algorithm": "ppo",
                "config": {"hidden": [8]},
                "lr": 0.01,
                "train_snips": 0.5,
                "seed": n,
                **({"x": 1} if n < 2 else {}),
            },
        }
        for n in (1, 2, 3)
    ]
    rolled_back = {**versions[0], "version": 4, "copy_of": 1, "created": 0, "candidate": "c0ffee"}
    page = report_page(document(versions=[*versions, rolled_back]))
    assert page.count("<polyline") == 1
    assert "training loss 0.3333 n = 3 versions" in text_of(page), (
        "a rollback is no step of training"
    )
    text = text_of(page)
    assert "learning rate 0.01" in text, "a constant is in the table"
    assert "settings hidden [8]" in text
    assert "estimate (snips) on the training rows" in text
    assert "train_snips" not in text
    assert "metrics of version 3" in page


def test_what_was_imported_and_not_judged_is_called_so() -> None:
    """Rows are named as in the commands, and the time axis is that of arrival."""
    bar = {
        "hour": 0,
        "version": -1,
        "source": "replayed",
        "steps": 5,
        "rewards": 1.0,
        "episodes": 1,
    }
    data = {"bars": [bar], "steps": 5, "skipped": {}, "why": None}
    decision = {
        "decided": 0, "candidate": "c0ffee", "verdict": None, "version": 1, "published": True,
        "episodes": 0, "reasons": ["without a gate"],
    }  # fmt: skip
    text = text_of(report_page(document(data=data, decisions=[decision])))
    for part in (
        "imported",
        "No version: the step was imported",
        "hour of arrival",
        "publish c0ffee",
    ):
        assert part in text, part


def test_years_of_many_versions_stay_a_page() -> None:
    """A page has at most 60 bars of 8 colours each, for any period."""
    bars = [
        {"hour": hour * HOUR, "version": hour // 50, "source": "on_policy", "steps": 5,
         "rewards": 1.0, "episodes": 1}
        for hour in range(0, 20_000, 2)
    ]  # fmt: skip
    data = {"bars": bars, "steps": 50_000, "skipped": {}, "why": None}
    page = report_page(document(data=data))
    assert page.count("<rect") <= 2 * 60 * 8
    assert "others" in page
    assert len(page) < 100_000
