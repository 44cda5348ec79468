"""Pages of the site that stand elsewhere in the repository, or are made from the code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import headrace
from headrace.__main__ import _command_line
from ingest.access.tokens import ANY, LEDGER
from ingest.protocol.errors import STATUS
from ingest.server.route_table import ROUTES

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "airflow.md": "airflow_dags/README.md",
}
TITLES = {
    "ingest.client": "Clients",
    "ingest.delivery": "Clients",
    "ingest.access": "Access",
    "ingest.embedded": "Inside the trainer's process",
    "ingest.importing": "Imports",
    "ingest.protocol": "Errors of clients and collectors",
    "ingest.server": "Errors of clients and collectors",
    "policy.algorithms": "Learning",
    "policy.data": "Jobs",
    "policy.exporting": "Exports",
    "policy.envs": "Environments",
    "policy.inference": "Acting",
    "policy.networks": "Networks",
    "policy.ope": "Off-policy evaluation",
    "policy.sampling": "Workers",
    "policy.training": "Jobs",
    "policy.worker": "Workers",
    "storage.conformance": "Errors of storage",
    "storage.declarations": "Declarations",
    "storage.errors": "Errors of storage",
    "storage.experience": "Experience",
    "storage.objects": "Where bytes are stored",
    "storage.reading": "Reading",
    "storage.shards": "Shards",
    "storage.spaces": "Spaces",
    "storage.weights": "Weights",
}
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
_MADE = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)
_LINK = re.compile(r"\]\(((?!https?:|#)[^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {page: _moved((ROOT / source).read_text()) for page, source in ELSEWHERE.items()}
    made["reference/python.md"] = "\n".join(_names())
    made["reference/commands.md"] = "\n".join(_commands())
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to what is no page become the path in the repository, a line
    `<!-- file: examples/... -->` becomes that file, and `<!-- made: ... -->` a table of the code's.
    """
    for page, source in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    linked = re.sub(
        r"\[([^]]+)\]\(\.\./((?:examples|airflow_dags|data|tests)/?[^)]*)\)", r"`\2`", markdown
    )
    made = {"routes": _routes, "codes": _codes}
    with_tables = _MADE.sub(lambda found: "\n".join(made[found[1]]()), linked)
    return _FILE.sub(lambda found: f"```python\n{(ROOT / found[1]).read_text()}```", with_tables)


def _moved(text: str) -> str:
    """A page from outside docs/, with its links as they are from docs/."""

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1].removeprefix("../"), found[2] or ""
        for page, source in ELSEWHERE.items():
            if target == source:
                return f"]({page}{anchor})"
        if target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')}{anchor})"
        return f"](../{target})"

    return _LINK.sub(link, text)


def _names() -> Iterator[str]:
    """Every public name, by the title of the folder that it comes from."""
    titled: defaultdict[str, list[str]] = defaultdict(list)
    for name in headrace.__all__:
        home = headrace._HOMES.get(name)
        if home is not None:
            path = home if home.endswith(f".{name}") else f"{home}.{name}"
            folder = ".".join(home.split(".")[:2])
            titled[TITLES[folder]].append(path)
    yield "# Python\n\nEverything here is imported from `headrace`.\n"
    for title, paths in sorted(titled.items()):
        yield f"## {title}\n"
        for path in sorted(paths):
            yield f"::: {path}\n"


def _routes() -> Iterator[str]:
    """Every route of the collector, with what it takes and answers."""
    yield "| route | does | takes | answers | scopes |\n|---|---|---|---|---|"
    for one in ROUTES:
        scopes = "any" if one.needed == ANY else " or ".join(sorted(one.needed & ANY)) or "none"
        scopes += ", or no tokens" if LEDGER in one.needed else ""
        taken, given = (
            "" if kind is None else f"`{getattr(kind, '__name__', kind)}`"
            for kind in (one.body, one.reply)
        )
        path = f"`{one.method} {one.path}`"
        yield f"| {path} | {one.summary} | {taken} | {one.status} {given} | {scopes} |"


def _codes() -> Iterator[str]:
    """Every code of an error, by its status."""
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for code, status in STATUS.items():
        by_status[status].append(f"`{code}`")
    yield "| status | codes |\n|---|---|"
    for status, codes in sorted(by_status.items()):
        yield f"| {status} | {', '.join(codes)} |"


def _commands() -> Iterator[str]:
    """Every command with its options, as `--help` has them."""
    yield "# Command line\n\nEach option is an environment variable, too; the option wins.\n"
    group = typer.main.get_command(_command_line())
    yield from _command(group, "headrace")


def _command(command: Any, path: str) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner is not None:
        for name in sorted(inner):
            yield from _command(inner[name], f"{path} {name}")
        return
    yield f"## {path}\n\n{command.help or ''}\n"
    rows = [one for one in command.params if one.name != "help"]
    if rows:
        yield "| argument or option | meaning | default | variable |\n|---|---|---|---|"
    for one in rows:
        record = ", ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts))
        help_text = getattr(one, "help", "") or ""
        default = (
            "" if one.default in (None, False) or callable(one.default) else f"`{one.default}`"
        )
        variable = f"`{one.envvar or '_'.join([*path.split(), one.name]).upper()}`"
        if one.param_type_name == "argument":  # only an option has one
            variable = ""
        row = f"| {record} | {help_text} | {default} | {variable} |"
        yield row.replace("\n", " ")
    yield ""
