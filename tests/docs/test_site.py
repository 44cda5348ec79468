"""The documentation builds as a site: no dead link, nothing fetched, nothing left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from ingest.protocol.errors import STATUS
from ingest.server.route_table import ROUTES
from tests.headrace.command import headrace as command

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: strict, so that a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder, ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def build(folder: Path, source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", folder],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_public_name_has_its_place(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    anchors = {found.rpartition(".")[2] for found in re.findall(r'id="([\w.]+)"', page)}
    assert set(headrace.__all__) <= anchors


def test_every_command_has_its_place(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    told = command("--help").stdout
    names = re.findall(r"^  ([a-z]+)\s", told.partition("Commands:")[2], re.M)
    assert len(names) > 10
    for name in names:
        assert f">headrace {name}" in page


def test_every_page_stands_in_the_table_of_contents(site: Path) -> None:
    index = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in index


def test_every_option_has_its_variable(site: Path) -> None:
    """Its own, by the command, or the one that `--help` names because commands share it."""
    page = (site / "reference" / "commands.html").read_text()
    for command_ in ("collect", "publish", "import"):
        told = command(command_, "--help").stdout.partition("Options:")[2]
        shared = set(re.findall(r"env\s+var:\s+(HEADRACE_\w+)", told))
        options = re.findall(r"^  --([a-z-]+)", told, re.M)
        own = {f"headrace_{command_}_{one}".upper().replace("-", "_") for one in options}
        found = set(re.findall(r"HEADRACE_\w+", page))
        assert shared <= found
        assert len(own & found) == len(options) - len(shared) - len(["--help"])
        assert len(options) > 10


def test_every_route_and_code_has_its_place(site: Path) -> None:
    page = (site / "wire_protocol.html").read_text()
    for route in ROUTES:
        assert f"<code>{route.method} {route.path}</code>" in page
    for code in STATUS:
        assert f"<code>{code}</code>" in page


def test_a_program_of_the_tutorial_stands_on_its_page(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "tutorial.html").read_text())
    assert "def visitor(rng: random.Random)" in text


def test_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    """In a copy of the pages, with a link to a page and one to a heading that are not there."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for page in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(page, tmp_path)
    for name in ("examples", "headrace", "ingest", "policy", "storage"):
        (tmp_path / name).symlink_to(ROOT / name)
    broken = tmp_path / "docs/cookbook.md"
    broken.write_text(broken.read_text() + "\n[a](nowhere.md), [b](limits.md#nowhere)\n")
    done = build(tmp_path / "site", tmp_path)
    assert done.returncode != 0
    assert "'nowhere.md'" in done.stderr
    assert "'limits.md#nowhere'" in done.stderr


def test_nothing_is_fetched(site: Path) -> None:
    """Style, scripts and images of the pages lie beside them."""
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+href="https?:[^>]+stylesheet'
    )
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text()), page
