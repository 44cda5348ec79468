"""`headrace import`: a file's rows through a collector, and what its columns declare."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.options import INTERRUPTED
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.spaces.descriptors import Box, Discrete
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.headrace.command import answer, headrace, refused

ROWS = ["user,x,arm,paid,prob"]
ROWS += [f"u{number % 3},{number / 4},{number % 2},{number % 5},0.5" for number in range(40)]
COLUMNS = ("--observation", "user:categories", "--observation", "x", "--action", "arm")
WORDS = (*COLUMNS, "--reward", "paid", "--action-prob", "prob", "--tag", "user=user")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text("\n".join(ROWS) + "\n")
    return path


def test_a_file_becomes_rows_once(file: Path, tmp_path: Path) -> None:
    """Every row is a step in a shard; a bad row is named and excluded; a repeat adds nothing."""
    lines = file.read_text().splitlines()
    lines[7] = "u1,1.0,7,1,0.5"
    file.write_text("\n".join(lines) + "\n")
    root = tmp_path / "run"
    declare(root, "box:2", "discrete:2")
    with CollectorProcess(root) as collector:
        words = ("import", file, *WORDS, "--address", collector.address)
        words += ("--categories", file.with_name("codes.json"))
        first = headrace(*words)
        assert first.returncode == 0, first.stderr
        assert "log.csv row 7: " in first.stdout
        assert "Import mended rows from a file of their own" in first.stdout
        assert f" for policy default of {collector.address}\n" in first.stdout
        assert "give --name NAME for one that grows" in first.stdout
        listed = re.search(
            r"`headrace ls` counts 39 rows of this in the stream (\S+),", first.stdout
        )
        again = answer(headrace(*words, "--json"))
        file.write_text("\n".join([lines[0], lines[7]]) + "\n")
        none = headrace(*words)
        assert none.returncode == 2, "no row can be used"
        assert collector.stop() == 0
    assert (again["rows"], again["steps"], again["rows_known"]) == (40, 0, 39)
    assert again["rows_left_out"] == 1
    rows = shard_rows(root)
    assert len(rows) == 39
    assert listed is not None
    assert [folder.name for folder in (root / "shards").iterdir()] == [listed[1]]
    assert {row["source"] for row in rows} == {"replayed"}
    assert rows[0]["tags"] == '{"user":"u0"}'
    assert headrace("verify", "--root", root).returncode == 0


def test_columns_declare_what_they_hold(file: Path, tmp_path: Path) -> None:
    """`--declare` writes the policy that a collector of this file needs, and sends nothing."""
    root = tmp_path / "run"
    declared = answer(headrace("import", file, *WORDS, "--declare", root, "--json"))["policy"]
    assert load_declarations(root)["default"] == PolicyDeclaration.from_json(declared)
    assert load_declarations(root)["default"].action == Discrete(2)
    with CollectorProcess(root) as collector:
        sent = headrace("import", file, *WORDS, "--address", collector.address, "--json")
        assert answer(sent)["steps"] == 40


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("log.csv", "--action", "arm", "--reward", "paid"), "--observation"),
        (("none.csv", *WORDS), "none.csv"),
        (("log.csv", *WORDS, "--time", "noon"), "noon"),
        (("log.csv", *WORDS, "--tag", "user"), "NAME=COLUMN"),
    ],
)
def test_bad_options_are_refused(file: Path, words: tuple[str, ...], text: str) -> None:
    """A missing file or column, and invalid options: status 2, no traceback."""
    assert refused(headrace("import", file.with_name(words[0]), *words[1:]), text)


def test_a_check_sends_nothing_and_shows_what_it_understood(file: Path, tmp_path: Path) -> None:
    """`--check` works with and without a collector; rows that would be left out give status 2."""
    shown = headrace("import", file, *WORDS, "--check", "--address", "http://127.0.0.1:9")
    assert shown.returncode == 0, shown.stderr
    for text in ("would be sent", "action, by the columns: ", "propensities", "40 episodes"):
        assert text in shown.stdout
    file.write_text(file.read_text() + "u1,1.0,1,,0.5\n")
    declare(tmp_path / "run", "box:2", "discrete:2")
    with CollectorProcess(tmp_path / "run") as collector:
        words = ("import", file, *WORDS, "--check", "--address", collector.address)
        words += ("--categories", file.with_name("codes.json"))
        checked = headrace(*words, "--json")
        assert (checked.returncode, answer(checked)["understood"]["spaces"]["by"]) == (
            2,
            "the collector",
        )
        assert answer(checked)["bad_counts"] == {"column paid: expected a number": 1}
        dropped = headrace(*words, "--missing", "drop", "--json")
        assert (dropped.returncode, answer(dropped)["rows_dropped"]) == (0, 1)
        assert collector.get("/readyz")[1]["steps"] == 0


def test_codes_need_a_file_that_is_named(file: Path, tmp_path: Path) -> None:
    """Without one an import is refused; with one the output says which, and how many names."""
    declare(tmp_path / "run", "multi_discrete:3,10", "discrete:2")
    kept = tmp_path / "codes.json"
    with CollectorProcess(tmp_path / "run") as collector:
        words = ("import", file, *WORDS, "--address", collector.address, "--missing", "drop")
        assert refused(headrace(*words), "user:categories", "--declare", "--categories FILE")
        assert "codes.json: user 3 names\n" in headrace(*words, "--categories", kept).stdout
    declare(tmp_path / "named", 'discrete:["u0","u1","u2"]', "discrete:2")
    with CollectorProcess(tmp_path / "named") as collector:
        words = ("import", file, *WORDS[:2], *WORDS[4:], "--address", collector.address)
        shown = headrace(*words, "--categories", kept).stdout
        assert "codes.json: not used, because the policy declares the names\n" in shown


def test_a_check_shows_times_as_dates_and_asks_for_no_rows(file: Path) -> None:
    """A wrong unit is seen at once: its dates are of another year, or none at all."""
    lines = file.read_text().splitlines()
    rows = [f"{line},{1_793_491_200 + at}" for at, line in enumerate(lines[1:])]
    file.write_text("\n".join([f"{lines[0]},at", *rows]) + "\n")
    words = ("import", file, *WORDS, "--time", "at", "--check", "--address", "http://127.0.0.1:9")
    right = headrace(*words, "--time-unit", "s").stdout
    assert "2026-11-01 00:00:00" in right
    assert re.search(r"known already .* not asked", right)
    assert "1970-01-01 00:29:53" in headrace(*words).stdout


def test_forgotten_propensities_are_said(file: Path, tmp_path: Path) -> None:
    """Rows without one are stored, but neither `dr` nor the gate uses them: the output says so."""
    words = ["import", file, *COLUMNS, "--reward", "paid"]
    assert headrace(*words, "--declare", tmp_path / "run").returncode == 0
    note = "Propensities are unknown: give --action-prob, --action-logp or --uniform."
    with CollectorProcess(tmp_path / "run") as collector:
        words += ["--address", collector.address]
        for given in ("--check", "--missing=error"):
            shown = headrace(*words, given)
            assert shown.returncode == 0, shown.stderr
            assert note in shown.stdout
            is_check = given == "--check"
            assert ("these options adds all rows again" in shown.stdout) is not is_check
            assert ("40 episodes would be sent" in shown.stdout) is is_check
            assert note not in headrace(*words, given, "--uniform", "--check").stdout
        named = headrace(*words, "--name", "shop").stdout
        assert "needs another --name, and adds all rows again" in named
        assert "Import mended rows" not in named
        assert refused(
            headrace(*words, "--name", "shop", "--uniform"), "another name all of its rows"
        )
        again = answer(headrace(*words, "--action-prob", "prob", "--json"))
        assert again["steps"] == 40, "as the note says"


def test_a_reward_window_is_said(file: Path, tmp_path: Path) -> None:
    """Imported rows await late rewards, unseen by `train`: the output says how long."""
    root, words = tmp_path / "run", ("import", file, *WORDS, "--policy-id", "default")
    assert headrace(*words, "--declare", root).returncode == 0
    declared = load_declarations(root)["default"]
    save_declaration(root, dataclasses.replace(declared, reward_window=5_400))
    save_declaration(root, dataclasses.replace(declared, policy_id="now"))
    sentence = "accept late rewards for 1 hour 30 minutes of the collector's running"
    with CollectorProcess(root) as collector:
        words += ("--address", collector.address)
        assert f"Imported episodes would {sentence}" in headrace(*words, "--check").stdout
        for _ in range(2):
            assert f"Imported episodes {sentence}" in headrace(*words).stdout
        assert headrace("ls", "--root", root).stdout.startswith("No shards yet")
        assert answer(headrace(*words, "--json"))["reward_windows"] == {"default": 5_400}
        assert "late rewards" not in headrace(*words[:-3], "now", *words[-2:]).stdout
        file.write_text("user,x,arm,paid,prob\nu0,1.0,1,none,0.5\n")
        assert "late rewards" not in headrace(*words).stdout, "no row of it was usable"


def test_a_fault_of_all_rows_does_not_hide_the_others(file: Path) -> None:
    """A wrong format of times is every row's error: three rows show it, others show theirs, and
    the table stays on the screen."""
    lines = file.read_text().splitlines()
    rows = [f"{line},1.11.2026" for line in lines[1:]]
    rows[20] = "u1,1.0,1,none,0.5,2026-11-01"
    file.write_text("\n".join([f"{lines[0]},at", *rows]) + "\n")
    words = ("import", file, *WORDS, "--time", "at", "--check", "--address", "http://127.0.0.1:9")

    def rows_named(text: str) -> list[int]:
        return [int(row) for row in re.findall(r"^log\.csv row (\d+): ", text, re.MULTILINE)]

    shown = headrace(*words)
    assert (shown.returncode, rows_named(shown.stdout)) == (2, [1, 2, 3, 21]), shown.stderr
    assert "... and 36 more rows with errors; in all:\n39 times: column at: " in shown.stdout
    assert "\n1 time: column paid: expected a number\n" in shown.stdout
    for most, listed in ((0, []), (30, [*range(1, 11), 21]), (120, [*range(1, 41)])):
        assert rows_named(headrace(*words, "--bad-shown", most).stdout) == listed


def test_an_interrupt_is_said(file: Path) -> None:
    """Ctrl-C ends a command with one line and 130."""
    words = [sys.executable, "-m", "headrace", "import", str(file), *WORDS]
    with subprocess.Popen(
        [*words, "--address", "http://127.0.0.1:9"], stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stderr is not None
        assert "trying for" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.stderr.read() == "headrace: interrupted\n"
    assert waiting.returncode == INTERRUPTED


def test_several_policies_have_columns_of_their_own(tmp_path: Path) -> None:
    """`POLICY=COLUMN`, agents, infos and next observations, as words."""
    root, path = tmp_path / "run", tmp_path / "log.csv"
    for name, size in (("walker", 2), ("flyer", 1)):
        space = Box((size,))
        declared = PolicyDeclaration(
            policy_id=name, observation=space, action=Discrete(3), seal_seconds=0.2
        )
        save_declaration(root, declared)
    path.write_text("m,n,who,x,y,h,nx,ny,nh,a,r\n1,0,w,1,2,,3,4,,0,1\n1,0,f,,,5,,,6,1,2\n")
    words = ["--episode", "m", "--step", "n", "--agent", "who", "--info", "seen=h"]
    words += ["--policy", "w=walker", "--policy", "f=flyer", "--reward", "r", "--action", "a"]
    for option, flyer in (("--observation", "h"), ("--final-observation", "nh")):
        columns = ("x", "y") if flyer == "h" else ("nx", "ny")
        for column in (*(f"walker={name}" for name in columns), f"flyer={flyer}"):
            words += [option, column]
    with CollectorProcess(root) as collector:
        words = ["import", str(path), *words, "--address", collector.address]
        checked = headrace(*words, "--check")
        assert "observation of flyer, by the collector: " in checked.stdout, checked.stderr
        assert answer(headrace(*words, "--json"))["steps"] == 2
        assert refused(headrace(*words, "--action", "r"), "the policy expects 1 number")
        assert refused(headrace(*words, "--declare", tmp_path / "other"), "expected one policy")
        assert collector.stop() == 0
    nobody = "http://127.0.0.1:9"
    reason = f"check: expected a collector at {nobody}, which has the spaces of several policies"
    assert refused(headrace(*words[:-1], nobody, "--check"), f"{reason}, but none answers")
    rows = {row["agent_id"]: row for row in shard_rows(root)}
    assert (rows["w"]["policy_id"], rows["f"]["policy_id"]) == ("walker", "flyer")
    assert json.loads(rows["f"]["infos"]) == {"seen": 5}
    assert rows["w"]["final_obs"].tolist() == [3.0, 4.0]


def test_propensities_are_checked_while_rows_are_imported(tmp_path: Path) -> None:
    """Arm 0 is taken in 70 % of the rows, and the file says 50 %."""
    arms = np.random.default_rng(0).choice(2, p=[0.7, 0.3], size=1000)
    rows = [f"{i % 7},{arm},1,0.5" for i, arm in enumerate(arms)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["x,arm,paid,p", *rows]) + "\n")
    words = ("--observation", "x", "--action", "arm", "--reward", "paid", "--action-prob", "p")
    nobody = ("--check", "--address", "http://127.0.0.1:9")
    shown = headrace("import", path, *words, *nobody)
    assert "log of default: propensities: the mean of [A = a] / propensity" in shown.stdout
    (check,) = answer(headrace("import", path, *words, *nobody, "--json"))["logs"]["default"]
    assert (check["passed"], round(check["value"], 1)) == (False, 1.4)


def test_a_statement_selects_what_is_imported(file: Path, tmp_path: Path) -> None:
    """It renames, filters and joins; a repeat adds nothing; faults are named by file and row."""
    statement = tmp_path / "select.sql"
    statement.write_text(
        "SELECT s.x AS age, s.arm, paid * weight AS earned, s.prob, s.file, s.row\n"
        "FROM source s JOIN (SELECT DISTINCT user, 2 AS weight FROM source) USING (user)\n"
        "WHERE user <> 'u2' -- not these\n"
    )
    words = ("import", file, "--sql", statement, "--type", "paid=DOUBLE")
    words += ("--observation", "age", "--action", "arm", "--reward", "earned")
    words += ("--action-prob", "prob")
    declare(tmp_path / "run", "box:1", "discrete:2")
    with CollectorProcess(tmp_path / "run") as collector:
        to = ("--address", collector.address, "--json")
        first, again = answer(headrace(*words, *to)), answer(headrace(*words, *to))
        assert (first["rows"], first["steps"], again["rows_known"]) == (27, 27, 27)
        assert first["understood"]["types"] == {"paid": "DOUBLE"}
        lines = file.read_text().splitlines()
        file.write_text("\n".join([*lines[:4], "u0,1.0,7,1,0.5", *lines[5:]]) + "\n")
        bad = headrace(*words, *to, "--check")
        found = json.loads(bad.stdout)["bad"]
        assert [(one["source"], one["row"]) for one in found] == [("log.csv", 4)]
        assert collector.stop() == 0
    rows = shard_rows(tmp_path / "run")
    earned = [2.0 * (number % 5) for number in range(40) if number % 3 != 2]
    assert sorted(row["rewards"] for row in rows) == sorted(earned)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT x, arm, paid FROM source WHERE false", "has no rows"),
        ("SELECT x, arm, paid::DATE AS paid FROM source", "Conversion Error"),
        ("SELECT x, arm FROM source", "no column 'paid'"),
        ("SELECT x, arm, paid FROM read_csv('log.csv')", "disabled"),
    ],
)
def test_a_statement_that_gives_no_rows_says_why(statement: str, expected: str, file: Path) -> None:
    """Nothing is sent, or declared."""
    words = ("import", file, "--sql", statement, "--check")
    words += ("--observation", "x", "--action", "arm", "--reward", "paid")
    assert refused(headrace(*words), expected)


def test_an_import_says_what_may_not_be_as_it_was_meant(tmp_path: Path) -> None:
    """Notes are printed; costs, shares and kinds are given by hand."""
    path = tmp_path / "log.csv"
    path.write_text("x,a,cost,k,end\n1,1.0,0.5,u,0\n2,2.0,0.25,v,1\n2,2.0,0.25,v,1\n3,1.0,1,w,0\n")
    words = ("import", path, "--observation", "x", "--action", "a:box", "--reward", "-cost")
    words += ("--truncated", "end", "--sample-prob", "0.5", "--dedupe", "k", "--check")
    report = answer(headrace(*words, "--json"))
    assert (report["steps"], report["rows_repeated"]) == (3, 1)
    assert report["understood"]["rewards"]["low"] == -1.0
    assert report["understood"]["spaces"]["action"]["kind"] == "box"
    shown = headrace(*words[:-3], "--check").stdout
    assert "Note: log.csv: the last row, after the last row where end is true" in shown
