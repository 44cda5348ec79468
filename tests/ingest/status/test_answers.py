"""The document of a collector's state: five answers, and what needs attention, with numbers.

The numbers are of `ingest.status.rewards`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingest.status.answers import Facts, PolicyFacts, policy_document, status_document
from storage.experience.reward_history import BEFORE, RewardHistory

HOUR = 3600
START = 1_800_000_000


def earned(
    history: RewardHistory, version: int, begin: int, mean: float, n: int = 4000, prob: float = 0.25
) -> None:
    """Count an hour of decisions, of which the share `mean` earned 1."""
    came = (START + begin + np.arange(n) * HOUR // n) * 1_000_000
    versions = np.full(n, version)
    values = np.diff(np.floor(np.arange(n + 1) * mean + 1e-9))
    history.add("rewards", came, versions, values)
    history.add("returns", came, versions, values)
    history.add("propensities", came, versions, np.full(n, prob) + values / 1000)


def history(*hours: tuple[int, float], prob: float = 0.25) -> RewardHistory:
    """Hours in which a version earned a mean."""
    found = RewardHistory()
    for number, (version, mean) in enumerate(hours):
        earned(found, version, number * HOUR, mean, prob=prob)
    return found


SOUND = PolicyFacts(
    name="default",
    served="version 7",
    wanted="version 7",
    roles={"live": 7, "previous": 6, "canary": None},
    trainer=True,
    rows_trained=12_000.0,
    history=history((BEFORE, 0.15), (6, 0.16), (7, 0.2)),
)
FACTS = Facts(
    policies=[SOUND],
    made=(START + 3 * HOUR) * 1_000_000,
    steps=5000,
    in_shards=4900,
    open=3,
    awaiting=0,
    silent=1.0,
    running=9000.0,
    refused=0,
    full=False,
    counts={"Now": {"collector_id": "0123456789ab"}},
    root="/data/run",
)


def answer(name: str, facts: Facts = FACTS, **changes: Any) -> str:
    """The text of an answer, with another policy than the sound one if there are changes."""
    if changes:
        facts = replace(facts, policies=[replace(SOUND, **changes)])
    return "\n".join(line["text"] for line in status_document(facts)["answers"][name])


def test_nothing_needs_attention_where_all_is_well() -> None:
    assert status_document(FACTS)["answers"]["needs"] == []


def test_what_is_live_and_what_is_served() -> None:
    assert "version 7 is served, as wanted" in answer("live")
    text = answer("live", served="version 6", why="its digest is wrong")
    assert "version 6 is served; version 7 is wanted (its digest is wrong)" in text
    text = answer("live", served="nothing", wanted="nothing")
    assert "nothing is published" in text
    assert "wanted" not in text


def test_better_than_the_last_and_than_the_rule_before() -> None:
    """0.2 against 0.16: +0.04, standard error sqrt(.16/4000 + .1344/4000): [+0.0232, +0.0568]."""
    text = answer("better")
    assert (
        "version 7 minus version 6: it looks better, 0.2 against 0.16 reward per decision" in text
    )
    assert "+0.04 [+0.0232, +0.0568], n = 4,000 and 4,000 decisions" in text
    assert "version 7 minus the rule before it: it looks better" in text
    few = RewardHistory()
    earned(few, 6, 0, 0.1)
    earned(few, 7, HOUR, 0.5, n=3)
    assert "cannot tell, fewer than 30" in answer("better", history=few)
    alone = {"live": 1, "previous": None, "canary": None}
    text = answer("better", roles=alone, history=history((1, 0.1)))
    assert "nothing earlier to compare with" in text


def test_a_canary_is_compared_with_what_is_live() -> None:
    roles = {"live": 7, "previous": None, "canary": 8}
    given = history((7, 0.2), (8, 0.1))
    assert "version 8 minus version 7: it looks worse" in answer(
        "better", roles=roles, history=given
    )
    needs = answer("needs", roles=roles, history=given)
    assert "version 8 earns less than version 7" in needs
    assert "--why TEXT` ends the canary" in needs


def test_a_first_version_that_earns_less_than_the_rule_before_needs_attention() -> None:
    """0.105 after 0.150, since its first hour; there is nothing to roll back to."""
    roles = {"live": 1, "previous": None, "canary": None}
    text = answer("needs", roles=roles, history=history((BEFORE, 0.15), (1, 0.105)))
    assert "version 1 earns less than the rule before it, 0.105 against 0.15 reward" in text
    assert "-0.045 [-0.0596, -0.0304], since 2027-01-15 09:00 UTC" in text
    assert "no earlier version to go back to" in text
    again = history((BEFORE, 0.15), (1, 0.105), (2, 0.15))
    roles = {"live": 2, "previous": 1, "canary": None}
    assert answer("needs", roles=roles, history=again) == "", "as good as the rule before"


def test_a_version_that_loses_names_the_command_that_goes_back() -> None:
    text = answer("needs", history=history((6, 0.2), (7, 0.1)))
    assert "`headrace rollback --root /data/run --policy-id default --why TEXT` goes back" in text
    assert answer("needs", history=history((6, 0.2), (7, 0.18))) == "", "2.3 standard errors"


@pytest.mark.parametrize(
    ("n", "second", "prob", "said"),
    [
        (4000, 0.2, 0.25, ""),
        (4000, 0.1, 0.25, "the reward per decision of version 7 fell from 0.2 to 0.1"),
        (4000, 0.3, 0.25, ""),
        (4000, 0.2, 0.4, "the mean propensity of version 7 drifted from 0.25 to 0.4"),
        (100_000, 0.19, 0.25, ""),
        (300, 0.1, 0.25, ""),
    ],
)
def test_a_reward_that_fell_and_a_propensity_that_drifted(
    n: int, second: float, prob: float, said: str
) -> None:
    """They are named with their interval and the time of the change. A rise is no trouble, nor is
    less than a tenth, 5.6 standard errors though it is, nor a half at 3.5 of them."""
    given = RewardHistory()
    earned(given, 7, 0, 0.2, n=n)
    earned(given, 7, HOUR, second, n=n, prob=prob)
    text = answer("needs", roles={"live": 7}, history=given)
    assert (said in text and "since 2027-01-15 09:00 UTC" in text) if said else text == ""


def test_returns_count_where_episodes_have_several_steps() -> None:
    given = RewardHistory()
    for version in (6, 7):
        earned(given, version, version * HOUR, 0.5)
    came = np.full(2000, START * 1_000_000)
    given.add("rewards", came, np.full(2000, 7), np.zeros(2000))
    assert (
        policy_document(replace(SOUND, history=given), root="")["measure"] == "return per episode"
    )
    assert policy_document(SOUND, root="")["measure"] == "reward per decision"


def test_data_and_learning() -> None:
    assert "Yes: the last event came just now" in answer("data")
    late = replace(FACTS, silent=7300.0)
    assert "Not now: the last event came 2 hours ago" in answer("data", late)
    assert answer("needs", late) == "Data has stopped: no event for 2 hours"
    assert "no event since the start" in answer("data", replace(FACTS, silent=None))
    assert "no event for 2 hours" in answer("needs", replace(FACTS, silent=None))
    assert answer("needs", replace(FACTS, silent=None, steps=0)) == "", "nothing ever came"
    assert "No, the disk is full" in answer("data", replace(FACTS, full=True))
    assert "yes, 12,000 rows trained on" in answer("learning")
    text = answer("learning", trainer=False, stalled=42.0)
    assert "its trainer has stopped; clients have waited 42 s" in text
    assert "12,000 rows trained on; it is stuck" in answer("learning", hint="it is stuck")
    assert "no trainer follows it" in answer("learning", trainer=None)


def test_a_disk_with_less_than_a_day_left() -> None:
    found = answer("needs", replace(FACTS, hours_left={"shards": 5.0, "journal": 30.0}))
    assert found == "The disk of shards/ will be full in 5.0 hours at the present rate."


def test_the_document_has_the_series_of_the_chart() -> None:
    """Every decision is in a point, by version; bands follow each other without a gap."""
    chart = policy_document(SOUND, root="")["chart"]
    by_version = {one["version"]: sum(p[1] for p in one["points"]) for one in chart["lines"]}
    assert by_version == {BEFORE: 4000, 6: 4000, 7: 4000}
    assert [one["version"] for one in chart["bands"]] == [BEFORE, 6, 7]
    assert [one["end"] for one in chart["bands"][:-1]] == [
        one["begin"] for one in chart["bands"][1:]
    ]
    assert policy_document(SOUND, root="/a b")["go_back"] == (
        "headrace rollback --root '/a b' --policy-id default --why TEXT"
    )
    names = [one["name"] for one in chart["small"]]
    assert names == ["decisions", "mean propensity"]


def test_a_time_in_which_a_version_hardly_acted_is_no_point() -> None:
    given = history((6, 0.2), (7, 0.2))
    earned(given, 6, 5 * HOUR, 1.0, n=5)
    (six, seven) = policy_document(replace(SOUND, history=given), root="")["chart"]["lines"]
    assert sum(point[1] for point in six["points"]) == 4000
    assert sum(point[1] for point in seven["points"]) == 4000


def test_the_span_reaches_back_before_the_live_version_as_long_as_it_acted() -> None:
    """Of 90 days, a version of the last 15 is on the chart of 45 days, one of the last 30 on that
    of all."""
    seconds = np.arange(90 * 96) * 900
    for days, levels in ((15, [0, 1, 2]), (30, [0, 1, 2, 3])):
        given = RewardHistory()
        versions = np.where(seconds >= (90 - days) * 24 * HOUR, 7, 6)
        given.add("rewards", (START + seconds) * 1_000_000, versions, np.ones(seconds.size))
        assert policy_document(replace(SOUND, history=given), root="")["levels"] == levels


@pytest.mark.parametrize(("n", "seconds"), [(100, 900), (1000, 360), (20_000, 120)])
def test_a_chart_of_few_decisions_has_few_points(n: int, seconds: int) -> None:
    """Three hours by the minute: 12 points at least, about 100 decisions each, 120 at most."""
    given = RewardHistory()
    for hour in range(3):
        earned(given, 7, hour * HOUR, 0.2, n=n)
    assert policy_document(replace(SOUND, history=given), root="")["chart"]["seconds"] == seconds
