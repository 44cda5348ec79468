"""The options of money, margins and all rows, through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.headrace.command import answer, headrace, refused
from tests.policy.judging.test_evaluate_verdicts import log_episodes


def drawn(root: Path, first: int, n: int) -> None:
    """Decisions by a uniform policy; the first action earns twice as much, sometimes a lot."""
    rng = np.random.default_rng(first)
    actions = rng.integers(4, size=(n, 1))
    bought = rng.random((n, 1)) < np.where(actions == 0, 0.6, 0.3)
    amounts = np.exp(2.0 * rng.normal(size=(n, 1)))
    obs = np.zeros((n, 1, 2))
    log_episodes(root, obs, actions, bought * amounts, np.full((n, 1), 0.25), first=first)


@pytest.mark.long
def test_two_nights_of_money(tmp_path: Path) -> None:
    """Night 1 publishes by a cap and a margin; night 2 judges what is newer than its training."""
    drawn(tmp_path, 0, 4000)
    words = ("--root", tmp_path)
    learn = ("train", *words, "--cross-fit", "4", "--algorithm", "snips", "--epochs", "60")
    trained = answer(headrace(*learn, "--json"))
    assert (trained["cross_fit"], trained["rows_held_out"]) == (4, 0)
    options = ("--reward-range", "0", "inf", "--reward-cap", "5", "--margin", "5%", "--json")
    done = headrace("publish", *words, *options)
    gate = answer(done)["gate"]
    assert (gate["verdict"], gate["reward_cap"], gate["margin"]) == ("better", 5.0, "5%")
    assert (gate["reward_range"], gate["approximate"], gate["episodes"]) == ([0, 5], False, 3000)
    assert "note: judged is min(reward, 5): " in done.stderr
    drawn(tmp_path, 4000, 1000)
    assert answer(headrace(*learn, "--seed", "1", "--json"))["rows_trained"] == 5000
    found = headrace("publish", *words, "--since", "live", *options)
    judged = json.loads(found.stdout)["gate"]
    assert (judged["after_live"], judged["episodes"], judged["others"]) == (1, 1000, 0)
    assert judged["excluded"] == {"in_lineage": 1250, "before_live": 2750}, "a quarter is a block"
    mistyped = headrace("evaluate", *words, "--margin", "much")
    assert refused(mistyped, "margin: expected reward per episode such as 0.02, or 1% of the bar")
