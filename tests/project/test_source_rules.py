"""Rules of the source that no linter checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.project.may_import import MAY_REACH_STDLIB

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("headrace", "ingest", "policy", "storage")
    for path in ROOT.glob(f"{package}/**/*.py")
)
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py"))
# The contract "pure" forbids modules; this file also forbids builtins.
PURE = [
    file
    for file in SHIPPED
    if file.startswith(tuple(folder.replace(".", "/") for folder in MAY_REACH_STDLIB))
]
LONGEST_FUNCTION = 80
BUILT_LATE = ("policy/algorithms/settings.py", "storage/shards/content.py")
"""Decode by numbers, literals and `dict[str, ...]`, which keep nothing that threads share."""
NEEDS_A_TOOL = (
    "tests/ingest/status/test_page.py",
    "tests/ingest/server/test_metrics_deploy.py",
)
"""May skip a test, and say so: no package brings Chromium or promtool, CI machines have none."""


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def dotted(node: ast.expr) -> str:
    """`a.b.c` as it is written; a part that is more than a name is empty, as in `.b.c`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(tree: ast.AST) -> Iterator[str]:
    """The names of what is called, also as a decorator without brackets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from map(dotted, node.decorator_list)


def late_decoders(tree: ast.AST) -> list[str]:
    """Calls within functions that make msgspec process a type for the first time."""
    return [
        ast.unparse(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and (
            dotted(node.func) in ("msgspec.convert", "convert")
            or dotted(node.func).split(".")[-1] == "Decoder"
            or (
                any(word.arg == "type" for word in node.keywords)
                and dotted(node.func).startswith("msgspec.")
            )
        )
    ]


def long_functions(tree: ast.AST) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= LONGEST_FUNCTION
    ]


def reasonless(source: str) -> list[str]:
    """Lines that disable a rule without a reason on the line or in a comment above it."""
    switch = re.compile(r"#\s*(?:noqa: [A-Z0-9, ]+|type: ignore\[[a-z-, ]+\])(.*)$")
    lines = ["", *source.splitlines()]
    return [
        line.strip()
        for above, line in pairwise(lines)
        if (found := switch.search(line))
        and not re.search(r"[a-z]{2,}", found[1])
        and not above.strip().startswith("#")
    ]


def test_a_module_fits_a_reader() -> None:
    """No function has over 80 lines, and each module has a docstring. Modules have no limit."""
    long = {file: found for file in SHIPPED if (found := long_functions(parsed(file)))}
    assert long == {}
    assert [file for file in SHIPPED if not ast.get_docstring(parsed(file))] == []


def test_a_switched_off_rule_says_why() -> None:
    """A noqa or a type: ignore carries its reason, on its line or in a comment above it."""
    bare = {file: found for file in SHIPPED if (found := reasonless((ROOT / file).read_text()))}
    assert bare == {}


def test_a_pure_folder_opens_nothing() -> None:
    """No files and no console: the contracts check imports, not builtins."""
    refused = {"open", "print", "input", "breakpoint"}
    assert PURE
    assert {file: found for file in PURE if (found := refused & set(calls(parsed(file))))} == {}


def test_a_type_is_read_before_threads_decode_by_it() -> None:
    """Decoders are built at import. msgspec (0.22) publishes a type to all threads before it has
    read the fields: a thread that decodes with it meanwhile crashes the process with SIGSEGV."""
    checked = sorted({*SHIPPED} - {*BUILT_LATE})
    assert {file: found for file in checked if (found := late_decoders(parsed(file)))} == {}


def test_a_test_neither_sleeps_nor_skips_nor_mocks() -> None:
    """A sleep hides a race, a skip hides a failure, a mock hides the real part."""
    refused = {"time.sleep", "sleep", "Mock", "MagicMock", "patch"}
    refused |= {"pytest.skip", "pytest.importorskip", "pytest.xfail"}
    hiding: dict[str, set[str]] = {}
    for file in TESTS:
        names = set(calls(ast.parse((ROOT / file).read_text())))
        found = names & (refused - {"pytest.skip"} if file in NEEDS_A_TOOL else refused)
        found |= {name for name in names if name.startswith(("pytest.mark.skip", "mock."))}
        if found:
            hiding[file] = found
    assert hiding == {}


def test_the_instruments_see_what_they_look_for() -> None:
    """The checks detect a long function, a hidden call, a late decoder and a bare noqa."""
    source = "def f():\n" + "    g.h()\n" * LONGEST_FUNCTION + "x = 1  # noqa: E501\n"
    assert long_functions(ast.parse(source)) == ["f"]
    assert set(calls(ast.parse(source))) == {"g.h"}
    assert set(calls(ast.parse("@pytest.mark.skip\ndef f(): pass"))) == {"pytest.mark.skip"}
    late = ["msgspec.json.decode(b, type=T)", "Decoder(T)", "msgspec.convert(b, T)"]
    late.append("get(m).json.Decoder(T)")
    assert [late_decoders(ast.parse(f"def f():\n    return {call}")) for call in late] == [
        [call] for call in late
    ]
    assert late_decoders(ast.parse("d = Decoder(T)\ndef f():\n    return json.decode(b)")) == []
    assert reasonless(source) == ["x = 1  # noqa: E501"]
    assert reasonless("x = 1  # noqa: E501 - a formula of the paper") == []


def test_a_class_name_stands_for_one_thing() -> None:
    """A name has one meaning, also a private one or an alias, so that a search finds it."""
    homes: dict[str, list[str]] = {}
    aliases: dict[str, list[str]] = {}
    for file in SHIPPED:
        if file.startswith("headrace/compat/"):
            continue  # the names of another library are what it is for
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.strip("_"), []).append(file)
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                aliases.setdefault(ast.unparse(node.target).strip("_"), []).append(file)
    found = {name: [*files, *aliases.get(name, ())] for name, files in homes.items()}
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
