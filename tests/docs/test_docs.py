"""The documentation's code runs against a real collector, in the order of each page."""

from __future__ import annotations

import builtins
import io
import os
import re
import shutil
import subprocess
import symtable
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.errors import WeightsNotFound
from storage.experience.range_set import RangeSet
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare
from tests.policy.judging.test_canary import EQUAL, SPEC, STREAM, Traffic

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((ROOT / document).read_text()) if kind == language]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with `data/run/first`, as the pages name it."""
    home = tmp_path_factory.mktemp("home")
    declare(home / "data/run/first", seal_seconds=0.3)
    return home


@pytest.fixture(scope="module")
def collector(home: Path) -> Iterator[CollectorProcess]:
    with CollectorProcess(home / "data/run/first") as process:
        yield process


def run_python(python: Path, code: str, home: Path, collector: CollectorProcess) -> str:
    code = code.replace("http://127.0.0.1:8642", collector.address)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-c", code], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(code: str, home: Path) -> str:
    """What a program prints in this process, which has torch loaded."""
    out = io.StringIO()
    with chdir(home), redirect_stdout(out):
        exec(compile(code, "page.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - our page
    return out.getvalue()


def run_shell(code: str, home: Path, collector: CollectorProcess) -> list[str]:
    environment = {**os.environ, "ADDRESS": collector.address}
    if shutil.which("curl") is None:
        tools = home / "tools"
        tools.mkdir(exist_ok=True)
        shim = tools / "curl"
        shim.write_text(
            f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("curl.py")} "$@"\n'
        )
        shim.chmod(0o755)
        environment["PATH"] = f"{tools}:{environment['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", code], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("}{", "}\n{").splitlines()


@pytest.fixture(scope="module")
def quickstart(home: Path, collector: CollectorProcess) -> str:
    """What the README's Python prints; it logs to the collector."""
    (code,) = blocks("README.md", "python")
    assert len(code.splitlines()) <= 25
    return run_python(Path(sys.executable), code, home, collector)


@pytest.fixture(scope="module")
def answers(home: Path, collector: CollectorProcess) -> list[str]:
    """The collector's answers to the curl page's shell blocks, in order."""
    return run_shell("\n".join(blocks("docs/curl.md", "sh")), home, collector)


def test_the_quickstart_of_the_readme_runs(quickstart: str) -> None:
    """README's Python reads back every step that it logged, with its true propensities."""
    assert quickstart.startswith("200 steps read")
    assert "0.3" in quickstart
    assert "0.7" in quickstart


def test_the_curl_page_runs(answers: list[str]) -> None:
    """Every shell block runs in order; the page quotes the refusal exactly."""
    (refusal,) = blocks("docs/curl.md", "json")
    assert refusal.strip() in answers
    state = next(line for line in answers if '"state"' in line)
    assert '"state":"terminated"' in state
    assert sum('"accepted":3' in line for line in answers) == 1
    assert sum('"duplicates":3' in line for line in answers) == 1


@pytest.mark.usefixtures("quickstart", "answers")
def test_the_pages_read_the_shards(home: Path, collector: CollectorProcess, loaded: Path) -> None:
    """The Python of the curl page and of the cookbook runs on the shards that the pages made."""
    assert collector.stop() == 0
    python = loaded / "python"
    (code,) = blocks("docs/curl.md", "python")
    code += "\nprint(steps.eps_id.unique())"
    assert "checkout-17" in run_python(python, code, home, collector)
    for code in blocks("docs/cookbook.md", "python"):
        assert run_python(python, code, home, collector)


@pytest.mark.parametrize(
    "page",
    [
        "sample_batch",
        "external_env",
        "workers",
        "objects",
        "conformance",
        "action_masks",
        "first_estimate",
        "own_models",
    ],
)
def test_a_page_that_needs_no_collector_runs(page: str, home: Path) -> None:
    """The page's blocks run in order, and each print with a comment of its output prints that."""
    code = "\n".join(blocks(f"docs/{page}.md", "python"))
    printed = run_here(code, home).splitlines()
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert promised
    assert promised == printed[-len(promised) :]


def test_a_bad_first_version_is_replaced(tmp_path: Path) -> None:
    """The page's code replaces a first version with an untrained policy that acts nearly uniformly,
    and pins it."""
    spec = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
    weights = {name: 100 * array for name, array in Policy(spec).get_weights().items()}
    declare(tmp_path / "run")
    store = WeightStore(tmp_path / "run", "default")
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    with pytest.raises(WeightsNotFound, match="clients act with this one until `headrace publish`"):
        store.rollback()
    (code,) = blocks("docs/publishing.md", "python")
    assert run_here(code, tmp_path) == "2\n"
    observations, rng = np.eye(4, dtype=np.float32), np.random.default_rng(0)
    bad, now = (NumpyPolicy.published(*store.read(version)) for version in (1, 2))
    assert abs(bad.act(observations, rng, explore=True).logp - np.log(0.5)).max() > 0.5
    assert abs(now.act(observations, rng, explore=True).logp - np.log(0.5)).max() < 0.05
    live = store.live()
    assert live is not None
    assert live.pinned is not None


def test_the_rows_behind_a_version_are_found(tmp_path: Path) -> None:
    """The page's code prints the live version's metrics, and counts the rows of its lineage."""
    traffic = Traffic(tmp_path / "run")
    traffic.log(30, EQUAL)
    weights, lineage = Policy(SPEC, seed=2).get_weights(), {STREAM: RangeSet([(0, 9)])}
    store = traffic.store
    store.publish(
        store.add_candidate(weights, spec=SPEC.to_json(), metrics={"run": "r1"}, lineage=lineage)
    )
    (code,) = blocks("docs/dashboard.md", "python")
    assert run_here(code, tmp_path) == "{'run': 'r1'}\n10 rows\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_block_has_the_names_that_it_uses(document: Path) -> None:
    """A block imports or assigns each name, or the text right above it says what it continues."""
    text, end = document.read_text(), 0
    for block in BLOCK.finditer(text):
        if block[1] in ("python", "py"):
            above = set(re.findall(r"`(\w+)`", text[end : block.start()]))
            assert undefined(block[2]) <= above, block[2]
        end = block.end()


def undefined(code: str) -> set[str]:
    """The names that a program uses and neither imports nor assigns."""
    program = symtable.symtable(code, "block", "exec")
    tables = [program]
    for table in tables:
        tables += table.get_children()
    own = {
        one.get_name() for one in program.get_symbols() if one.is_assigned() or one.is_imported()
    }
    used = {
        one.get_name()
        for table in tables
        for one in table.get_symbols()
        if one.is_referenced() and (one.is_global() or table is program)
    }
    return used - own - set(dir(builtins)) - {"__name__"}


def test_a_missing_import_is_found() -> None:
    assert undefined("def f(a):\n    b = a\n    return np.zeros(b), f, len, c\n") == {"np", "c"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, and the cells of its tables, without code blocks and addresses."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for row in re.findall(r"^\|(.*)\|$", text, re.MULTILINE):
        yield from re.split(r"(?<!\\)\|", row)
    text = re.sub(r"^(\||#).*$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", text):
        yield from re.split(r"[.!?][\"')*`]*\s", paragraph)


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_no_sentence_and_no_cell_is_long(document: Path) -> None:
    """Each sentence and table cell of a page has at most 40 words."""
    assert [one for one in sentences(document.read_text()) if len(one.split()) > 40] == []


def test_a_long_sentence_or_cell_is_found() -> None:
    """A long sentence or cell is found, but not one that only a list, a code block or an address
    makes long."""
    words = "word " * 21
    page = f"A. {words}\n{words}b.\n\n- {words}\n- {words}\n\n[c]({words}{words}) d\n"
    page += f"```\n{words * 2}\n```\n| {words}{words}| e |\n"
    assert [len(one.split()) for one in sentences(page) if len(one.split()) > 40] == [42, 43]


def test_the_readme_begins_with_the_two_commands_that_set_everything_up() -> None:
    """`make demo` and `make test` are its first block; as targets they need nothing but `setup`."""
    readme = (ROOT / "README.md").read_text()
    first = blocks("README.md", "sh")[0]
    assert [line.split("  # ")[0] for line in first.splitlines()] == ["make demo", "make test"]
    assert readme[: readme.index(first)].count("\n") < 40
    assert all(tool in readme[: readme.index(first)] for tool in ("Python 3.11", "make", "gcc"))
    makefile = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^(\w+): ?([\w $()-]*?) *##", makefile, re.MULTILINE))
    assert needs["demo"] == "setup"
    assert (needs["test"], needs["lint"], needs["unit"]) == ("lint", "setup", "setup")


def test_the_readme_fits_its_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
