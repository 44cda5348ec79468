"""The documentation builds as a site: no dead link, nothing fetched, nothing left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from html import unescape
from pathlib import Path
from typing import get_type_hints
from urllib.parse import unquote

import msgspec
import pytest

import headrace
from ingest.access.tokens import SCOPES
from ingest.protocol.errors import STATUS
from ingest.server.route_table import ROUTES
from policy.algorithms.settings import AnnotatedSettings, settings_of
from tests.headrace.command import headrace as command

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Built:
    """A built site, and the output of its build."""

    folder: Path
    status: int
    stderr: str


CONFIGS = [
    *("ActionRule", "BanditConfig", "Bootstrap", "CQLConfig", "ImportOptions", "ModuleSpec"),
    *("PPOConfig", "PolicyDeclaration", "PolicySpec", "StudentT"),
]
"""Records that a user fills in."""


def fields_of(record: object) -> list[str]:
    """The names of the fields of a dataclass, a Struct or a NamedTuple; else none."""
    if is_dataclass(record):
        return [one.name for one in fields(record)]
    if isinstance(record, type) and issubclass(record, (msgspec.Struct, tuple)):
        return list(getattr(record, "__struct_fields__", getattr(record, "_fields", ())))
    return []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The site of a copy of docs/ with two broken links, to a page and to a heading, built as `make
    docs` does. One build is enough, since a strict build writes every page before it fails."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "docs", copy / "docs")
    for page in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(page, copy)
    for name in ("airflow_dags", "examples", "headrace", "ingest", "policy", "storage"):
        (copy / name).symlink_to(ROOT / name)
    broken = copy / "docs/cookbook.md"
    broken.write_text(broken.read_text() + "\n[a](nowhere.md), [b](limits.md#nowhere)\n")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", copy / "site"],
        cwd=copy,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return Built(copy / "site", done.returncode, done.stderr)


@pytest.fixture(scope="module")
def site(built: Built) -> Path:
    return built.folder


def test_a_dead_link_ends_the_build_and_nothing_else_does(built: Built) -> None:
    """The two planted links are all that a strict build has to say."""
    assert built.status != 0
    page, heading = re.findall("^(?:WARNING|ERROR|CRITICAL) .*", built.stderr, re.MULTILINE)
    assert "'nowhere.md'" in page
    assert "'limits.md#nowhere'" in heading


def test_every_link_of_a_page_leads_to_a_file_of_the_site(site: Path) -> None:
    """Except for the planted link, each link leads to a file of the site, also to files that are
    not pages, which the build does not check."""
    followed = set()
    for page in site.rglob("*.html"):
        for target in re.findall(r'<(?:a|link)\b[^>]*\bhref="([^":#?]+)[#?"]', page.read_text()):
            if target != "nowhere.md" and not (page.name == "404.html" and target.startswith("/")):
                followed.add(page.parent / unquote(unescape(target)))
    assert site / "deploy/Containerfile" in followed
    assert [path for path in followed if not path.exists()] == []


def test_every_public_name_has_its_place(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    anchors = {found.rpartition(".")[2] for found in re.findall(r'id="([\w.]+)"', page)}
    assert set(headrace.__all__) <= anchors


def test_every_field_of_a_record_is_on_the_page(site: Path) -> None:
    """In the section of its class, with its comment if it has one; what configures something has a
    table with the meaning of every field."""
    page = (site / "reference" / "python.html").read_text()
    _, *parts = re.split(r'<h[23] id="[\w.]+\.(\w+)" class="doc', page)
    named = zip(parts[::2], parts[1::2], strict=True)
    texts = {name: unescape(re.sub(r"<[^>]+>", "", text)) for name, text in named}
    records = {one: getattr(headrace, one) for one in headrace.__all__ if one in headrace._HOMES}
    found = {name: fields_of(record) for name, record in records.items()}
    assert len([name for name in found if found[name]]) > 30
    for name, own in found.items():
        for field in own:
            assert re.search(rf"\b{field}: ", texts[name]), f"{name}.{field}"
    for name in CONFIGS:
        if issubclass(records[name], AnnotatedSettings):
            meanings = [one.meaning.replace("`", "") for one in settings_of(records[name])]
            assert [one for one in meanings if one not in texts[name]] == []
            assert "description=" not in texts[name]
            continue
        hints = get_type_hints(records[name], include_extras=True)
        for field in found[name]:
            stated = [m for m in getattr(hints[field], "__metadata__", ()) if isinstance(m, str)]
            told = stated or re.search(rf"^ +{field}: \S", records[name].__doc__, re.M)
            assert told, f"{name}.{field}"
    assert "policy_id: str" in texts["WeightStore"]
    assert "effective sample size" in texts["Estimate"]
    assert "microseconds since the epoch, the client's" in texts["Part"]


def test_every_command_has_its_place(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    help_text = command("--help").stdout
    names = re.findall(r"^  ([a-z]+)\s", help_text.partition("Commands:")[2], re.M)
    assert len(names) > 10
    for name in names:
        assert f">headrace {name}" in page


def test_every_page_stands_in_the_table_of_contents(site: Path) -> None:
    index = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in index


def test_every_option_has_its_variable(site: Path) -> None:
    """The option's own variable, or the one that `--help` names because commands share it."""
    page = (site / "reference" / "commands.html").read_text()
    for command_ in ("collect", "publish", "import"):
        help_text = command(command_, "--help").stdout.partition("Options:")[2]
        shared = set(re.findall(r"env\s+var:\s+(HEADRACE_\w+)", help_text))
        options = re.findall(r"^  --([a-z-]+)", help_text, re.M)
        own = {f"headrace_{command_}_{one}".upper().replace("-", "_") for one in options}
        found = set(re.findall(r"HEADRACE_\w+", page))
        assert shared <= found
        assert len(own & found) == len(options) - len(shared) - len(["--help"])
        assert len(options) > 10


def test_every_route_and_code_has_its_place(site: Path) -> None:
    page = (site / "wire_protocol.html").read_text()
    for route in ROUTES:
        assert f"<code>{route.method} {route.path}</code>" in page
    scopes = re.findall(r"<td>([^<]*)</td>\n</tr>", page)
    words = {word for cell in scopes[: len(ROUTES)] for word in re.split(r" or |, ", cell)}
    assert words <= {*SCOPES, "any", "none", "or no tokens"}
    for code in STATUS:
        assert f"<code>{code}</code>" in page


def test_a_program_of_the_tutorial_stands_on_its_page(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "tutorial.html").read_text())
    assert "def visitor(rng: random.Random)" in text


def test_nothing_is_fetched(site: Path) -> None:
    """Styles, scripts and images are part of the site."""
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+href="https?:[^>]+stylesheet'
    )
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text()), page
