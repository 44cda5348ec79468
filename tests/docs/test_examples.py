"""Every file under examples/ is run by some test; the notebook is run here, without Jupyter.

examples/service: tests/docs/test_web_service.py. examples/recommender: tests/docs/test_tutorial.py.
examples/own_models: tests/docs/test_own_models.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
RUN_BY = {
    "own_models": "test_own_models.py",
    "recommender": "test_tutorial.py",
    "service": "test_web_service.py",
}


def cells(notebook: Path) -> list[dict[str, Any]]:
    return list(json.loads(notebook.read_text())["cells"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_one(notebook: Path) -> None:
    """The document and its cells follow the schema of nbformat 4.5, and no output is stored."""
    document = json.loads(notebook.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert set(document) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    names = [cell["id"] for cell in document["cells"]]
    assert len(set(names)) == len(names)
    for cell in document["cells"]:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        own = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | own
        assert all(isinstance(line, str) for line in cell["source"])
        assert not own or (cell["execution_count"], cell["outputs"]) == (None, [])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(notebook: Path) -> None:
    """The notebook's cells run in one namespace, and the judged policy earns more than the logged
    one."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in cells(notebook):
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                exec(compile(source, f"{notebook.name}:{cell['id']}", "exec"), names)  # noqa: S102  ours
    assert "would send 3,000 steps" in printed.getvalue()
    assert names["report"].steps == names["batch"].count == 3000
    assert names["judged"].interval[0] > names["logged"].value


def test_each_folder_of_examples_is_run() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(RUN_BY)
    for folder, test in RUN_BY.items():
        text = (Path(__file__).with_name(test)).read_text()
        text += (ROOT / "docs/tutorial.md").read_text()
        programs = [path for path in (EXAMPLES / folder).iterdir() if path.suffix == ".py"]
        assert programs
        assert all(path.stem in text for path in programs)
