"""Options that commands of several packages share: one name, one environment variable, one help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core


class Command(typer.core.TyperCommand):
    """A command that refuses an option which is given twice and takes one value.

    The library would take the last one, and go on without a word about the others.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        options = [one for one in given if one.param_type_name == "option"]
        for option in options:
            single = not (option.multiple or option.is_flag)
            if single and options.count(option) > 1:
                ctx.fail(
                    f"{option.opts[0]}: expected it once, got it {options.count(option)} times"
                )
        return super().parse_args(ctx, args)


ROOT = Path("data/run")
"""Where a run goes unless it is told otherwise."""

ADDRESS = "http://127.0.0.1:8642"
"""Where a collector is unless it is told otherwise."""

Root = Annotated[
    Path,
    typer.Option(envvar="HEADRACE_ROOT", help="The folder that holds journal, shards and weights."),
]
PolicyId = Annotated[
    str, typer.Option(envvar="HEADRACE_POLICY_ID", help="Which policy, when there are several.")
]
Manifest = Annotated[
    Path | None,
    typer.Option(help="Of `freeze`: use nothing else, and do it once, however often asked."),
]
RetryFor = Annotated[
    float,
    typer.Option(
        envvar="HEADRACE_RETRY_FOR",
        help="Seconds for which a shard that cannot be read is tried again.",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", envvar="HEADRACE_JSON", help="Print one line of JSON instead."),
]
Seed = Annotated[int, typer.Option(envvar="HEADRACE_SEED", help="Same seed, same result.")]
Address = Annotated[str, typer.Option(envvar="HEADRACE_ADDRESS", help="Of the collector.")]
Url = Annotated[
    str | None,
    typer.Option("--url", help="Of a collector that publishes, in place of a root's weights."),
]
Token = Annotated[
    str | None,
    typer.Option(envvar="HEADRACE_TOKEN", help="Better by its variable: `ps` shows options."),
]
Ca = Annotated[
    Path | None, typer.Option(envvar="HEADRACE_CA", help="PEM certificates to trust for https.")
]
