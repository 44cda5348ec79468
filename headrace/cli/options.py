"""Options that several commands share, with one name, environment variable and help text each."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

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


def period(since: str | None, until: str | None) -> dict[str, int | None]:
    """Convert `since` and `until` to microseconds since the epoch; without a zone they are in UTC.

    Raises ValueError for text that is not an ISO 8601 date, and for an end not after the start.
    """
    found = {"since": _moment("--since", since), "until": _moment("--until", until)}
    low, high = found["since"], found["until"]
    if low is not None and high is not None and low >= high:
        raise ValueError(f"--until: expected a time after --since {since}, got {until}")
    return found


def judged_period(since: str | None, until: str | None) -> dict[str, Any]:
    """As `period`, where `since` may also be live: the live version's training."""
    after_live = since == "live"
    return {**period(None if after_live else since, until), "after_live": after_live}


def _moment(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{option}: expected a date of ISO 8601, got {text!r:.80}") from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1_000_000)


ROOT = "data/run"
"""The default root."""
LOCAL_ROOT = Path(ROOT)

ADDRESS = "http://127.0.0.1:8642"
"""The default address of a collector."""

Text = str | None
Texts = list[str] | None


def local_root(text: str) -> Path:
    """Parse a root that has to be a local folder."""
    try:
        return require_local(text, "root")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


_ROOT: dict[str, Any] = {"envvar": "HEADRACE_ROOT", "metavar": "<path>"}
Root = Annotated[
    str, typer.Option(**_ROOT, help="Folder of journal, shards and weights, or a store's address.")
]
LocalRoot = Annotated[
    Path, typer.Option(**_ROOT, parser=local_root, help="Folder of journal, shards and weights.")
]
PolicyId = Annotated[str, typer.Option(envvar="HEADRACE_POLICY_ID", help="Policy to use.")]
Manifest = Annotated[
    str | None,
    typer.Option(
        metavar="<path>",
        help="Manifest of `freeze`: use only its data; a repeated run changes nothing.",
    ),
]
RetryFor = Annotated[
    float,
    typer.Option(
        envvar="HEADRACE_RETRY_FOR",
        help="Seconds to retry a shard that cannot be read.",
    ),
]
SchemaId = Annotated[
    str | None,
    typer.Option(help="Schema to read, if spaces have changed; default: the declared one."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="tag:NAME: hold out and judge all episodes with the same tag value as one unit."
    ),
]
Since = Annotated[
    str | None,
    typer.Option(help="Only episodes that began at or after this time: 2026-11-23, ...T08:00Z."),
]
SinceLive = Annotated[
    str | None,
    typer.Option(
        "--since",
        help="As in train; or live: only episodes newer than what the live version was trained on.",
    ),
]
Until = Annotated[str | None, typer.Option(help="Only episodes that began before this time.")]
RewardCap = Annotated[
    Text,
    typer.Option(
        help="Judge min(reward, cap) per step, as for amounts of money; auto: a cap from the first "
        "tenth of the episodes, which are then not judged."
    ),
]
MarginText = Annotated[
    str,
    typer.Option(
        "--margin",
        help="Better by at least this, in reward per episode or as 1% of the bar; -1%: not worse "
        "by more.",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", envvar="HEADRACE_JSON", help="Print one line of JSON instead."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")]
ObservationSpace = Annotated[Text, typer.Option(help="Observation space, such as box:4.")]
ActionSpace = Annotated[Text, typer.Option(help="Action space, such as discrete:2.")]
EnvSpaces = Annotated[Text, typer.Option(help="Id of a gymnasium environment, for its spaces.")]
Redeclare = Annotated[
    bool,
    typer.Option("--redeclare", help="Permit other spaces than those that the root declares."),
]
Seed = Annotated[int, typer.Option(envvar="HEADRACE_SEED", help="Same seed, same result.")]
Address = Annotated[str, typer.Option(envvar="HEADRACE_ADDRESS", help="Address of the collector.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="Address of a collector that publishes, instead of using a root's weights."
    ),
]
Token = Annotated[
    str | None,
    typer.Option(envvar="HEADRACE_TOKEN", help="Token. Prefer the variable: `ps` shows options."),
]
AdminToken = Annotated[
    str | None,
    typer.Option(envvar="HEADRACE_TOKEN", help="Token with scope admin, for a running collector."),
]
Ca = Annotated[
    Path | None, typer.Option(envvar="HEADRACE_CA", help="PEM certificates to trust for https.")
]
