"""`headrace token`: make, list and revoke the tokens that a collector accepts."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Meta

from headrace.cli.declared import expanded
from headrace.cli.options import LOCAL_ROOT, Command, Json, LocalRoot
from headrace.cli.roots import require_root

if TYPE_CHECKING:
    from ingest.access.tokens import Token

app = typer.Typer(
    name="token",
    no_args_is_help=True,
    help="Make, list and revoke the tokens that a collector accepts.",
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command(cls=Command)
@expanded
def create(
    name: Annotated[str, "Name of the token's user.", Meta(extra={"argument": True})],
    scope: Annotated[
        list[str], "log, act, weights:read, weights:publish, erase or admin. May be repeated."
    ],
    root: LocalRoot = LOCAL_ROOT,
    expires: Annotated[str | None, "Lifetime: 90d, 12h, 30m, 10s."] = None,
    rate: Annotated[float | None, "Most events per second."] = None,
    open_episodes: Annotated[int | None, "Most open episodes at a time."] = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it, once: only its hash is kept."""
    from headrace.output import console
    from ingest.access.admission import audit
    from ingest.access.key_files import create_token, load_tokens
    from ingest.server.logs import configure

    first = not load_tokens(root)
    lives = None if expires is None else _seconds(expires)
    token, text = create_token(
        root, name, scope, lives=lives, rate=rate, open_episodes=open_episodes
    )
    configure()
    audit("token_created", id=token.id, name=token.name, scopes=token.scopes)
    if first:
        print(
            f"The first token of {root}: from now on every request to its collector needs one, "
            f"even if all are revoked.",
            file=sys.stderr,
        )
    if as_json:
        return console.line({"token": text, **_document(token)})
    return print(text)


@app.command("list", cls=Command)
@expanded
def list_tokens(root: LocalRoot = LOCAL_ROOT, as_json: Json = False) -> None:
    """List all tokens with scopes, expiry and revocation."""
    require_root(root)
    from headrace.output import console
    from ingest.access.key_files import load_tokens

    documents = [_document(token) for token in load_tokens(root)]
    if as_json:
        return console.line({"tokens": documents})
    columns = ("id", "name", "state", "scopes", "created", "expires", "rate", "open_episodes")
    rows = [[_shown(name, one[name]) for name in columns] for one in documents]
    return console.table("Tokens", columns, rows)


@app.command(cls=Command)
@expanded
def revoke(
    which: Annotated[str, "A token's name or id.", Meta(extra={"argument": True})],
    root: LocalRoot = LOCAL_ROOT,
    as_json: Json = False,
) -> None:
    """Revoke a token; a running collector refuses it within a second."""
    require_root(root)
    from headrace.output import console
    from ingest.access.admission import audit
    from ingest.access.key_files import revoke_token
    from ingest.server.logs import configure

    token = revoke_token(root, which)
    configure()
    audit("token_revoked", id=token.id, name=token.name)
    if as_json:
        return console.line(_document(token))
    return print(f"Revoked {token.name} ({token.id}).")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if not found:
        raise ValueError(f"--expires: expected a number and s, m, h or d, got {text!r:.40}")
    return float(int(found[1]) * _UNITS[found[2]])


def _document(token: Token) -> dict[str, Any]:
    """A token as JSON: everything but its hash."""
    import time

    import msgspec

    document = {k: v for k, v in msgspec.structs.asdict(token).items() if k != "sha256"}
    return {**document, "scopes": list(token.scopes), "state": token.state(time.time())}


def _shown(name: str, value: Any) -> Any:
    from headrace.output.console import moment

    if name in ("created", "expires"):
        return moment(None if value is None else value * 1_000_000)
    return ", ".join(value) if name == "scopes" else value
