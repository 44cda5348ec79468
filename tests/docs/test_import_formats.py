"""Each command of the page about formats runs on a file that the format's program wrote."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ingest.importing.formats.opening import FORMATS
from ingest.importing.inference import infer_spaces
from ingest.importing.options import ImportOptions
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import answer, headrace

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "fixtures" / "formats"
PAGE = (ROOT / "docs" / "import_formats.md").read_text()


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """Each source is declared for a policy of its own, and imported by one collector."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for one in blocks for line in one.splitlines()]
    words = [line[2:] for line in lines if line[1] == "import"]
    root = tmp_path / "run"
    plain = [one for one in words if "--declare" not in one and "--check" not in one]
    for number, (source, _, name, *_) in enumerate(plain):
        seen, acted = infer_spaces(ImportOptions(source=FILES / source, format=name))
        declared = PolicyDeclaration(observation=seen, action=acted, policy_id=f"p{number}")
        save_declaration(root, declared)
    with CollectorProcess(root) as collector:
        for number, (source, *options) in enumerate(plain):
            given = ("import", FILES / source, *options, "--policy-id", f"p{number}")
            report = answer(headrace(*given, "--address", collector.address, "--json"))
            assert report["steps"] == report["rows"] > 0
            assert report["understood"]["format"]["name"] == options[1]
        assert collector.stop() == 0
    assert {row["policy_id"] for row in shard_rows(root)} == {f"p{n}" for n in range(len(plain))}
    assert {one[2] for one in plain} == {*FORMATS} - {"cb_json", "headrace"}


def test_the_page_names_every_format() -> None:
    assert set(FORMATS) == {name for name in FORMATS if f"`{name}`" in PAGE}
