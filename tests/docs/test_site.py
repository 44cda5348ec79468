"""The documentation builds as a site: no dead link, nothing fetched, nothing left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from tests.headrace.command import headrace as command

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: strict, so that a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_has_its_place(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    anchors = {found.rpartition(".")[2] for found in re.findall(r'id="([\w.]+)"', page)}
    assert set(headrace.__all__) <= anchors


def test_every_command_has_its_place(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    told = command("--help").stdout
    names = re.findall(r"^│ ([a-z]+)\s", told, re.M)
    assert len(names) > 10
    for name in names:
        assert f">headrace {name}" in page


def test_every_page_stands_in_the_table_of_contents(site: Path) -> None:
    index = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in index


def test_nothing_is_fetched(site: Path) -> None:
    """Style, scripts and images of the pages lie beside them."""
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+href="https?:[^>]+stylesheet'
    )
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text()), page
