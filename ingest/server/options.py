"""How a collector serves, and what it declares first: the options of `collect` and `up`.

Light enough for a command line that only shows its help.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ingest.web.limits import ServerLimits


@dataclass(frozen=True)
class Listening:
    """The address to listen on, the accepted host names, and the certificate.

    `insecure` allows an address other than loopback without TLS. Tokens and data are then sent in
    clear text, so that a private network or a proxy must protect them.
    """

    host: Annotated[str, "Address to listen on; other than loopback requires tokens and TLS."] = (
        "127.0.0.1"
    )
    port: Annotated[int, "Port; 0 chooses a free one.", Meta(ge=0, le=65535)] = 8642
    tls_cert: Annotated[Path | str | None, "PEM certificate chain: serve HTTPS."] = None
    tls_key: Annotated[Path | str | None, "PEM key; default: in the chain's file."] = None
    insecure: Annotated[
        bool, "Send tokens in clear text.", Meta(extra={"name": "--insecure-no-tls"})
    ] = False
    allow_hosts: Annotated[tuple[str, ...], "Host name that clients use. May be repeated."] = ()


@dataclass(frozen=True, kw_only=True)
class DeclaringSpaces:
    """The spaces that a policy is declared with: of short forms, or of an environment."""

    observation: Annotated[str | None, "Observation space, such as box:4."] = None
    action: Annotated[str | None, "Action space, such as discrete:2."] = None
    env: Annotated[str | None, "Id of a gymnasium environment, for its spaces."] = None
    redeclare: Annotated[bool, "Permit other spaces than those that the root declares."] = False


@dataclass(frozen=True, kw_only=True)
class Declaring(DeclaringSpaces):
    """What a policy is declared with; a file in place of spaces."""

    policy: Annotated[Path | None, "Policy file (JSON)."] = None
    reward_window: Annotated[float | None, "Seconds in which a step accepts late rewards."] = None
    reward_range: Annotated[
        tuple[float, float] | None,
        "Least and most that a step can earn, such as 0 1; judging then has bounds that hold at "
        "every sample size.",
    ] = None


@dataclass(frozen=True)
class ServeOptions:
    """How and where a collector serves. Without a root there are no tokens: loopback only.

    `declare` is called when the address is bound, before anything is written under the root.
    `announce` gets the address and the Collector. `listener` is a socket that is bound to the
    address in `listening`. `compact_hours`: the interval of compaction, None for none.
    """

    root: Path | None = None
    listening: Listening = field(default_factory=Listening)
    compression: Annotated[Literal["zstd", "lz4"], "Compression of shards: zstd or lz4."] = "zstd"
    compact_hours: Annotated[
        float | None,
        "Join small shards in a child process, every N hours.",
        Meta(ge=0.0001, extra={"name": "--compact"}),
    ] = None
    on_seal: Annotated[
        str | None,
        "Post the ordinals in shards to this address after each new shard; #NUMBER names an asset "
        "of Airflow.",
        Meta(extra={"metavar": "<url>"}),
    ] = None
    on_seal_token: Annotated[
        str | None, "Bearer token for it. Prefer the variable: `ps` shows options."
    ] = field(default=None, repr=False)
    version: str = ""
    announce: Callable[[str, Any], None] | None = None
    limits: Annotated[
        ServerLimits,
        "NAME=NUMBER, such as max_connections=200; see docs/limits.md.",
        Meta(extra={"repeated": True, "parse": ServerLimits.of}),
    ] = field(default_factory=ServerLimits)
    supervise: Annotated[bool, "Restart the serving process when it is killed."] = False
    declare: Callable[[], None] | None = None
    listener: socket.socket | None = None

    def __post_init__(self) -> None:
        if self.compression not in ("zstd", "lz4"):
            raise ValueError(f"--compression: expected zstd or lz4, got {self.compression!r}")
