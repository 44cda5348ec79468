"""Options that several commands share, with one name, environment variable and help text each."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from msgspec import Meta

from storage.objects.opening import require_local


def _simplify(params: list[Any], ctx: Any) -> None:
    """Show no variable that follows from an option's name, and plain types.

    Typer shows <list[str]> for an option that may be repeated, and <int range> for a bounded one.
    """
    for one in params:
        one.show_envvar = one.envvar is not None
        named = getattr(one, "display_type", None)  # of later releases; TEXT and INTEGER before
        if named and one.param_type_name == "option" and one.metavar is None and not one.is_flag:
            shown = named(ctx)
            one.metavar = re.sub(r"list\[(\w+)\]|(\w+) range", r"\1\2", shown).lower()


INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ends: 128 and the number of SIGINT."""


class Group(typer.core.TyperGroup):
    """The command line itself."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; say so if Ctrl-C ends it, with the notes of the interrupt."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            parts = ["interrupted", *getattr(interrupt, "__notes__", ())]
            print(f"headrace: {'; '.join(parts)}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from interrupt

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _simplify(self.get_params(ctx), ctx)
        super().format_help(ctx, formatter)


class Command(typer.core.TyperCommand):
    """A command that refuses a repeated option if the option takes one value.

    Typer would silently use the last value.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _simplify(self.params, ctx)
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write arguments as the help writes types: <source>, where the library has {source}."""
        pieces = super().collect_usage_pieces(ctx)
        return [f"<{one[1:-1]}>" if one.startswith("{") else one for one in pieces]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        options = [one for one in given if one.param_type_name == "option"]
        for option in options:
            single = not (option.multiple or option.is_flag)
            if single and options.count(option) > 1:
                ctx.fail(f"{option.opts[0]}: expected once, got {options.count(option)} times")
        return super().parse_args(ctx, args)


ROOT = "data/run"
"""The default root."""
LOCAL_ROOT = Path(ROOT)

Text = str | None


def local_root(text: str) -> Path:
    """Parse a root that has to be a local folder."""
    try:
        return require_local(text, "root")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


_ROOT: dict[str, Any] = {"envvar": "HEADRACE_ROOT", "metavar": "<path>"}
Root = Annotated[
    str, "Folder of journal, shards and weights, or a store's address.", Meta(extra=_ROOT)
]
LocalRoot = Annotated[
    Path,
    "Folder of journal, shards and weights.",
    Meta(extra={**_ROOT, "parser": local_root}),
]
PolicyId = Annotated[str, "Policy to use.", Meta(extra={"envvar": "HEADRACE_POLICY_ID"})]
Manifest = Annotated[
    str | None,
    "Manifest of `freeze`: use only its data; a repeated run changes nothing.",
    Meta(extra={"metavar": "<path>"}),
]
Json = Annotated[
    bool,
    "Print one line of JSON instead.",
    Meta(extra={"name": "--json"}),
]
Port = Annotated[int, "Port; 0 chooses a free one.", Meta(ge=0, le=65535)]
Redeclare = Annotated[bool, "Permit other spaces than those that the root declares."]
Token = Annotated[str | None, "Token. Prefer the variable: `ps` shows options."]
AdminToken = Annotated[str | None, "Token with scope admin, for a running collector."]
Ca = Annotated[Path | None, "PEM certificates to trust for https."]
