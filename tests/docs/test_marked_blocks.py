"""Every program of the documents that opens a client or a trainer is marked, and is run.

A marker is an HTML comment on the line above the block:

    <!-- run: trainer; arguments 0 -->
    <!-- run: client; declares walker box:2 discrete:3 -->
    <!-- run: client; acts CartPole-v1; arguments ADDRESS local -->
    <!-- run: elsewhere; tests/docs/test_security.py -->

A `trainer` prints its address, and trains on `100_000` rows. A `client` finds a collector at
127.0.0.1:8642 or at ADDRESS, which declares the marker's policies (`default box:4 discrete:2`);
with `acts`, weights for that environment are live. `elsewhere` names the test that runs the block.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import pytest

from headrace import Policy, PolicyDeclaration, PolicySpec, from_gym
from policy.inference.weight_store import WeightStore
from storage.declarations.policy_files import save_declaration
from tests.collector_process import CollectorProcess, declare
from tests.docs.test_two_files import Program

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^(?:<!-- run: ([^\n]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPENS = re.compile(r"\b(?:PolicyClient|PolicyServerInput)\(")
INDENTED = re.compile(r"^ {4}.*\b(?:PolicyClient|PolicyServerInput)\(", re.MULTILINE)
COMPANY = ("logging", "idle", "killed")
SECONDS = 240


@dataclass
class Marked:
    """A block and its marker."""

    page: str
    kind: str
    code: str
    arguments: list[str] = field(default_factory=list)
    declares: list[list[str]] = field(default_factory=list)
    acts: str | None = None
    elsewhere: str | None = None


def parsed(page: str, marker: str, code: str) -> Marked:
    kind, *rest = (part.strip() for part in marker.split(";"))
    made = Marked(page, kind, code)
    for part in rest:
        word, _, value = part.partition(" ")
        if kind == "elsewhere":
            made.elsewhere = part
        elif word == "declares":
            made.declares.append(value.split())
        elif word == "acts":
            made.acts = value
        elif word == "arguments":
            made.arguments = value.split()
        else:
            raise ValueError(f"{page}: marker {marker!r}: unknown {word!r}")
    return made


def marked(text: str, page: str) -> list[Marked]:
    """The marked blocks of a page. Raises ValueError for one that needs a marker and has none."""
    found = []
    for marker, code in BLOCK.findall(text):
        if not marker and OPENS.search(code):
            raise ValueError(f"{page}: a block that opens a client or a trainer without a marker")
        if marker:
            found.append(parsed(page, marker, code))
    if INDENTED.search(BLOCK.sub("", text)):
        raise ValueError(f"{page}: an indented block opens a client or a trainer: mark it")
    if len(found) != text.count("<!-- run:"):
        raise ValueError(f"{page}: a marker without a block of Python below it")
    return found


BLOCKS = [one for path in DOCUMENTS for one in marked(path.read_text(), path.name)]


def of_kind(kind: str) -> list[object]:
    return [pytest.param(b, id=f"{b.page}-{i}") for i, b in enumerate(BLOCKS) if b.kind == kind]


@contextmanager
def company(python: Path, address: str, kinds: tuple[str, ...] = COMPANY) -> Iterator[None]:
    """Start three other clients: one that logged and exited, an idle one, a killed one."""
    with subprocess.Popen(
        [python, "-m", "tests.docs.client_beside", address],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process, ExitStack() as stack:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for kind in kinds:
            print(kind, file=process.stdin, flush=True)
            done, pid = process.stdout.readline().split()
            if done != kind:
                raise RuntimeError(f"the {kind} client did not do its part")
            if kind == "killed":
                os.kill(int(pid), signal.SIGKILL)
            elif kind == "idle":
                stack.callback(os.kill, int(pid), signal.SIGKILL)
        yield


def test_the_documents_have_programs_of_both_kinds() -> None:
    """The pages contain marked blocks; without them the tests below would run nothing."""
    assert {block.kind for block in BLOCKS} == {"client", "trainer", "elsewhere"}


@pytest.mark.parametrize("block", of_kind("elsewhere"))
def test_a_block_that_runs_elsewhere_names_a_test_of_its_page(block: Marked) -> None:
    assert block.elsewhere is not None
    assert Path(block.page).stem in (ROOT / block.elsewhere).read_text()


@pytest.mark.parametrize("block", of_kind("trainer"))
def test_a_trainer_trains_in_any_company(block: Marked, tmp_path: Path, loaded: Path) -> None:
    """A trainer survives a client that only logs, an idle one and a killed one: it continues with
    the next acting client, here with two episodes open at once, and ends as documented."""
    assert "100_000" in block.code
    python, program = loaded / "python", tmp_path / "program.py"
    program.write_text(block.code.replace("100_000", "1024"))
    with ExitStack() as stack:
        trainer = Program(python, str(program), *block.arguments)
        stack.callback(trainer.close)
        address = trainer.line().split()[-1]
        stack.enter_context(company(python, address))
        words = ["-m", "headrace.demo.play", address, "CartPole-v1", "--seats", "2"]
        player = Program(python, *words)
        stack.callback(player.close)
        code, lines = trainer.rest(SECONDS)
        assert code == 0, lines
        versions = [int(line.split()[1]) for line in lines]
        assert versions == sorted(versions)
        assert versions[-1] >= 3


@pytest.mark.parametrize("block", of_kind("client"))
def test_a_client_runs_in_any_company(block: Marked, tmp_path: Path, loaded: Path) -> None:
    """An acting client works next to one that only logs, an idle one and a killed one."""
    root = tmp_path / "data/run/first"
    for policy_id, observation, action in block.declares or [["default", "box:4", "discrete:2"]]:
        declare(root, observation, action, policy_id=policy_id)
    if block.acts is not None:
        env = gymnasium.make(block.acts)
        spec = PolicySpec(from_gym(env.observation_space), from_gym(env.action_space))
        declared = PolicyDeclaration(observation=spec.observation, action=spec.action)
        save_declaration(root, declared)
        store = WeightStore(root, "default")
        weights = Policy(spec, seed=1).get_weights()
        store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    python = loaded / "python"
    with CollectorProcess(root) as collector, company(python, collector.address):
        code = block.code.replace("http://127.0.0.1:8642", collector.address)
        program = tmp_path / "program.py"
        program.write_text(code.replace("range(1000)", "range(3)"))
        words = [collector.address if w == "ADDRESS" else w for w in block.arguments]
        done = subprocess.run(
            [sys.executable, str(program), *words],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nPolicyClient(1)\n```\n", "without a marker"),
        ("text\n\n    PolicyServerInput(None)\n", "indented block"),
        ("<!-- run: client -->\n\n```python\nPolicyClient(1)\n```\n", "without a"),
        ("<!-- run: client; argument 0 -->\n```python\nPolicyClient(1)\n```\n", "unknown"),
    ],
)
def test_a_program_that_nobody_runs_is_found(text: str, message: str) -> None:
    """A page with a block that is not marked, or marked wrongly, fails as a whole."""
    with pytest.raises(ValueError, match=message):
        marked(text, "page.md")
