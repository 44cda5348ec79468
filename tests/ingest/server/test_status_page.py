"""The page at `/` answers five questions, checked as text and in a browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import urllib3

from ingest.client.policy_client import PolicyClient
from ingest.collector.version_metrics import Moments
from ingest.server.status_page import Facts, PolicyFacts, status_page
from policy.inference.weight_store import WeightStore
from tests.collector_process import CollectorProcess, declare
from tests.ingest.client.test_local_inference import publish
from tests.ingest.client.test_local_inference_canary import candidate, play, wait_served

QUESTIONS = (
    "What is live?",
    "Is it better than the previous one?",
    "Does data arrive?",
    "Is training running?",
    "What needs attention?",
)
SOUND = PolicyFacts(
    name="default",
    served="version 7",
    wanted="version 7",
    roles={
        "live": (7, Moments(100, 60.0, 60.0)),
        "previous": (6, Moments(400, 120.0, 120.0)),
        "canary": (None, Moments()),
    },
    trainer=True,
    rows_trained=12_000.0,
)
FACTS = Facts(
    policies=[SOUND],
    steps=5000,
    in_shards=4900,
    open=3,
    awaiting=0,
    silent=1.0,
    refused=0,
    full=False,
    needs=[],
    counts={"Now": {"collector_id": "0123456789ab"}},
)


class Text(HTMLParser):
    """The text of each section by its id, and the resources that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.fetched: list[str] = []
        self._at: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.fetched += [found[name] or "" for name in ("src", "href") if name in found]
        if tag == "section":
            self._at = found["id"]

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._at = None

    def handle_data(self, data: str) -> None:
        if self._at is not None:
            self.sections[self._at] = self.sections.get(self._at, "") + data


def read(page: bytes) -> Text:
    text = Text()
    text.feed(page.decode())
    return text


def section(name: str, facts: Facts = FACTS) -> str:
    return read(status_page(facts)).sections[name]


def test_five_questions_and_nothing_to_fetch() -> None:
    """The page answers five questions in order, in one file, and is navigable by keyboard."""
    page = status_page(FACTS)
    found = read(page)
    assert [one.split("?")[0] + "?" for one in found.sections.values()] == list(QUESTIONS)
    assert found.fetched == []
    assert page.count(b'tabindex="0"') == 5
    assert len(page) < 16_000


def test_what_is_live_and_what_is_served() -> None:
    assert "version 7 is served, as wanted" in section("live")
    late = replace(SOUND, served="version 6", why="its digest is wrong")
    text = section("live", replace(FACTS, policies=[late]))
    assert "version 6 is served; version 7 is wanted (its digest is wrong)" in text
    new = replace(SOUND, served="nothing", wanted="nothing")
    text = section("live", replace(FACTS, policies=[new]))
    assert "nothing is published" in text
    assert "wanted" not in text


def test_better_than_the_last_with_n_and_interval() -> None:
    """+0.3 with standard error sqrt(.24/99 + .21/399): [+0.194, +0.407]."""
    text = section("better")
    assert "version 7 minus version 6: it looks better, +0.3 [+0.1" in text
    assert "n = 100 and 400 episodes" in text
    few = replace(SOUND, roles={**SOUND.roles, "live": (7, Moments(3, 3.0, 3.0))})
    assert "cannot tell, fewer than 30" in section("better", replace(FACTS, policies=[few]))
    first = replace(SOUND, roles={"live": (1, Moments()), "previous": (None, Moments())})
    assert "no earlier version" in section("better", replace(FACTS, policies=[first]))


def test_a_canary_is_compared_with_what_is_live() -> None:
    roles = {**SOUND.roles, "canary": (8, Moments(200, 20.0, 20.0))}
    text = section("better", replace(FACTS, policies=[replace(SOUND, roles=roles)]))
    assert "version 8 minus version 7: it looks worse" in text
    assert "headrace canary gives the verdict" in text


def test_data_and_learning() -> None:
    assert "Yes: the last event came just now" in section("data")
    assert "Not now: the last event came 2 hours ago" in section(
        "data", replace(FACTS, silent=7300.0)
    )
    assert "no event since the start" in section("data", replace(FACTS, silent=None))
    assert "No, the disk is full: the last event came" in section("data", replace(FACTS, full=True))
    assert "yes, 12,000 rows trained on" in section("learning")
    stopped = replace(SOUND, trainer=False, stalled=42.0)
    text = section("learning", replace(FACTS, policies=[stopped]))
    assert "its trainer has stopped; clients have waited 42 s" in text
    stuck = replace(SOUND, hint="the return has not moved <b>")
    text = section("learning", replace(FACTS, policies=[stuck]))
    assert "12,000 rows trained on; the return has not moved <b>" in text
    unseen = replace(SOUND, trainer=None)
    assert "no trainer follows it" in section("learning", replace(FACTS, policies=[unseen]))


def test_counts_say_what_time_they_cover() -> None:
    """Counts of the journal's life and those of the process stand apart, by plain names."""
    counts = {"Over the journal's whole life": {"steps_in_shards": 12}}
    page = status_page(replace(FACTS, counts=counts))
    assert b"<caption>Over the journal&#x27;s whole life</caption>" in page
    assert b"<th scope=row>steps in shards</th><td>12</td>" in page
    text = section("data", replace(FACTS, refused=2))
    started, life = text.index("Since this collector started: 2"), text.index("whole life: 5,000")
    assert "3 open episodes. " in text[:started]
    assert started < life
    waiting = section("data", replace(FACTS, awaiting=2))
    assert "3 open episodes, 2 more waiting for late rewards. " in waiting


def test_what_needs_me() -> None:
    assert section("needs").endswith("Nothing.")
    assert "pinned <by> me" in section("needs", replace(FACTS, needs=["pinned <by> me"]))
    assert b"pinned <by>" not in status_page(replace(FACTS, needs=["pinned <by> me"]))


def test_a_collector_says_how_it_is(tmp_path: Path) -> None:
    """The collector's page shows its own counters over HTTP; a canary is listed as unfinished."""
    declare(tmp_path)
    publish(tmp_path, 1)
    store = WeightStore(tmp_path, "default")
    with CollectorProcess(tmp_path) as process:
        before = read(urllib3.request("GET", process.address).data)
        assert "no event since the start" in before.sections["data"]
        with PolicyClient(process.address) as client:
            play(client)
        store.start_canary(candidate(store, 2), 0.25)
        wait_served(process, store)
        answer = urllib3.request("GET", process.address)
        found = read(answer.data).sections
        assert "version 1 is served, as wanted; canary: version 2 in 0.25" in found["live"]
        assert "2 steps taken" in found["data"]
        assert "no trainer follows it" in found["learning"]
        assert "a canary is on" in found["needs"]
        assert re.match(r"text/html", answer.headers["content-type"])
        assert process.stop() == 0


FRAME = """<body style="margin:0"><iframe src="inside.html" width=%d height=800
style="border:0"></iframe><script>
document.querySelector("iframe").onload=event=>{
const inside=event.target.contentWindow,root=inside.document.documentElement;
const sections=[...inside.document.querySelectorAll("section")];
const last=Math.max(...sections.map(one=>one.getBoundingClientRect().bottom));
const focused=sections.filter(one=>{one.focus();return inside.document.activeElement===one}).length;
document.title=[inside.innerWidth,root.scrollWidth-inside.innerWidth,Math.ceil(last),
inside.matchMedia("(prefers-color-scheme:dark)").matches,focused].join(" ")}
</script>"""
"""Measures the page in a frame: a window of Chromium is never narrower than 500 pixels."""


@pytest.mark.parametrize(("width", "policies", "dark"), [(400, 1, True), (1280, 4, False)])
def test_all_answers_are_on_the_first_screen(
    tmp_path: Path, width: int, policies: int, dark: bool
) -> None:
    """800 pixels high, by a screenshot of headless Chromium where one is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"expected one of {', '.join(names)}: no headless Chromium is installed")
    canary = replace(SOUND, name="ranking-of-the-front-page-v2", share=0.1)
    canary = replace(canary, roles={**SOUND.roles, "canary": (8, Moments(200, 20.0, 20.0))})
    shown = [canary, *(replace(SOUND, name=f"policy-{number}") for number in range(1, policies))]
    (tmp_path / "inside.html").write_bytes(
        status_page(replace(FACTS, policies=shown, needs=["a canary is on"] * policies))
    )
    page = tmp_path / "page.html"
    page.write_text(FRAME % width)
    shot = tmp_path / "shot.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={max(600, width)},900", "--allow-file-access-from-files"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    subprocess.run([*command, f"--screenshot={shot}", page.as_uri()], check=True, timeout=60)
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    asked = [*command, "--dump-dom", page.as_uri()]
    result = subprocess.run(asked, check=True, timeout=60, capture_output=True, text=True)
    found = re.search("<title>(.*)</title>", result.stdout)
    assert found, result.stdout
    inner, too_wide, below, is_dark, focused = found[1].split()
    assert (inner, too_wide, is_dark) == (str(width), "0", str(dark).lower())
    assert int(below) <= 800, "the fifth answer ends in the first screen"
    assert focused == "5", "keys reach every answer"
