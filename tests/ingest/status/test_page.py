"""The page at `/`: rewards and five answers, as text and in a browser where there is one.

Decisions are in the words of `ingest.status.decision_words`, drawn by `ingest.status.chart`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import urllib3

from ingest.client.policy_client import PolicyClient
from ingest.status.answers import Facts, status_document
from ingest.status.page import status_page
from policy.inference.weight_store import WeightStore
from storage.experience.reward_history import BEFORE, RewardHistory
from tests.collector_process import CollectorProcess, declare
from tests.ingest.client.test_local_inference import publish
from tests.ingest.client.test_local_inference_canary import candidate, play, wait_served
from tests.ingest.status.test_answers import FACTS, HOUR, SOUND, START, earned, history

SECTIONS = ["needs", "live", "better", "data", "learning"]
CANARY = replace(
    SOUND,
    name="ranking-of-the-front-page-v2",
    share=0.1,
    roles={"live": 7, "previous": 6, "canary": 8},
    history=history((BEFORE, 0.15), (6, 0.16), (7, 0.2), (8, 0.22)),
    decisions=[
        {"decided": (START + HOUR) * 1_000_000, "candidate": "c0ffee", "verdict": "better",
         "version": 6, "published": True, "episodes": 400, "reasons": ["better <than> before"]},
        {"decided": (START + 3 * HOUR) * 1_000_000, "candidate": "c0ffee", "verdict": None,
         "kind": "rollback", "version": 8, "published": True, "episodes": 0, "reasons": []},
    ],
)  # fmt: skip


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


def page_of(facts: Facts = FACTS, **asked: Any) -> bytes:
    return status_page(status_document(facts, **asked))


def test_five_questions_and_nothing_to_fetch() -> None:
    """The page answers five questions in order, in one file, and is navigable by keyboard."""
    page = page_of(replace(FACTS, policies=[CANARY]))
    found = read(page)
    assert list(found.sections) == SECTIONS
    assert not [one for one in found.fetched if not one.startswith("?")], "links are the page's own"
    assert page.count(b'tabindex="0"') == 5
    assert len(page) < 60_000


def test_the_reward_is_drawn_with_its_versions_and_decisions() -> None:
    """Once for wide and once for narrow screens: a band and a line by version, the bar, marks."""
    page = page_of(replace(FACTS, policies=[CANARY])).decode()
    for drawing in page.split("<svg")[1:3]:
        drawing = drawing.partition("</svg>")[0]
        assert drawing.count("<polyline") == 4
        assert drawing.count('class="band"') == 3, "a canary has none"
        assert drawing.count('class="bar"') == 1
        assert drawing.count('class="mark') == 2
        assert "rollback: live as version 8" in drawing
    assert "&lt;than&gt;" in page
    assert "<than>" not in page
    assert "+0.04 [+0.0232, +0.0568] against version 6" in page
    assert "To go back: <code>headrace rollback --root /data/run" in page


def test_a_decision_beyond_the_calendar_is_shown_as_a_number() -> None:
    late = {**CANARY.decisions[0], "decided": 2**62}
    page = page_of(replace(FACTS, policies=[replace(CANARY, decisions=[late])])).decode()
    assert page.count("4611686018427 s") == 3, "in both drawings, and in the list"


def test_a_page_whose_login_is_over_asks_for_the_token_again() -> None:
    assert "if(answer.status===401)return location.reload();" in page_of().decode()


def test_one_or_two_points_are_points() -> None:
    few = RewardHistory()
    earned(few, 7, 0, 0.2, n=1)
    page = page_of(replace(FACTS, policies=[replace(SOUND, history=few)])).decode()
    assert page.count("<circle") == 2
    assert "<polyline" not in page
    empty = page_of(replace(FACTS, policies=[replace(SOUND, history=RewardHistory())])).decode()
    assert "No step is in a shard yet" in empty


def test_the_chosen_policy_comes_first_and_the_others_are_links() -> None:
    shown = [replace(SOUND, name=name) for name in ("a", "b & c")]
    page = page_of(replace(FACTS, policies=shown), chosen="b & c").decode()
    assert page.index("<b>b &amp; c</b>") < page.index("?policy=a")


def test_counts_say_what_time_they_cover() -> None:
    """Counts of the journal's life and those of the process stand apart, by plain names."""
    counts = {"Over the journal's whole life": {"steps_in_shards": 12}}
    page = page_of(replace(FACTS, counts=counts))
    assert b"<caption>Over the journal&#x27;s whole life</caption>" in page
    assert b"<th scope=row>steps in shards</th><td>12</td>" in page


def test_what_needs_me() -> None:
    assert read(page_of()).sections["needs"].endswith("Nothing.")
    page = page_of(replace(FACTS, needs=["pinned <by> me, `headrace resume` ends it"]))
    assert "pinned <by> me" in read(page).sections["needs"]
    assert b"pinned <by>" not in page
    assert b"<code>headrace resume</code>" in page


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
        document = json.loads(urllib3.request("GET", f"{process.address}/v1/status").data)
        assert [one["text"] for one in document["answers"]["live"]] == [
            found["live"].partition("?")[2]
        ]
        assert "2 steps taken" in found["data"]
        assert "no trainer follows it" in found["learning"]
        assert "a canary is on" in found["needs"]
        assert re.match(r"text/html", answer.headers["content-type"])
        process.settle(2)
        before = process.get("/v1/status")[1]["policies"][0]["chart"]
        assert sum(point[1] for line in before["lines"] for point in line["points"]) == 1
        process.kill()
        process.restart()
        assert process.get("/v1/status")[1]["policies"][0]["chart"] == before, "it is on disk"
        assert process.stop() == 0


FRAME = """<body style="margin:0"><iframe src="inside.html" width=%d height=800
style="border:0"></iframe><script>
document.querySelector("iframe").onload=event=>{
const inside=event.target.contentWindow,root=inside.document.documentElement;
const sections=[...inside.document.querySelectorAll("section")];
const charts=[...inside.document.querySelectorAll("figure svg")];
const drawn=charts.map(one=>one.getBoundingClientRect());
const last=Math.max(...drawn.map(one=>one.bottom));
const words=[...inside.document.querySelectorAll("th,td,p,li,b,span,small")];
const broken=words.filter(one=>one.scrollWidth>one.clientWidth+1&&one.clientWidth).length;
const focused=sections.filter(one=>{one.focus();return inside.document.activeElement===one}).length;
document.title=[inside.innerWidth,root.scrollWidth-inside.innerWidth,Math.ceil(last),
inside.matchMedia("(prefers-color-scheme:dark)").matches,focused,
drawn.filter(one=>one.height).length,broken].join(" ")}
</script>"""
"""Measures the page in a frame: a window of Chromium is never narrower than 500 pixels."""


@pytest.mark.parametrize(("width", "policies", "dark"), [(400, 1, True), (1280, 4, False)])
def test_attention_and_the_reward_are_on_the_first_screen(
    tmp_path: Path, width: int, policies: int, dark: bool
) -> None:
    """800 pixels high, by a screenshot of headless Chromium where one is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"expected one of {', '.join(names)}: no headless Chromium is installed")
    shown = [CANARY, *(replace(SOUND, name=f"policy-{number}") for number in range(1, policies))]
    facts = replace(FACTS, policies=shown, needs=["a canary is on"])
    (tmp_path / "inside.html").write_bytes(page_of(facts, chosen=CANARY.name))
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
    inner, too_wide, below, is_dark, focused, drawn, broken = found[1].split()
    assert (inner, too_wide, is_dark) == (str(width), "0", str(dark).lower())
    assert int(below) <= 800, "what needs attention and the reward are on the first screen"
    assert (drawn, broken) == ("1", "0"), "one drawing for each width; no text leaves its box"
    assert focused == "5", "keys reach every answer"
