"""Tokens and their limits, without a socket: time is an argument.

Also of `ingest.collector.quotas`.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.access.admission import Admission, Hosts
from ingest.access.key_files import TokenFile, create_token, load_tokens, revoke_token
from ingest.access.tokens import (
    ACTING,
    LOCAL,
    LOGGING,
    NOBODY,
    PUBLISHING,
    Allowance,
    Token,
    TokenBook,
    TokenError,
    bearer,
    hashed,
    masked,
    require_allowance,
)
from ingest.collector.live_policies import LivePolicies
from ingest.delivery.transport import Transport
from ingest.protocol.errors import CollectorFailed, Refusal
from ingest.server.routes import Routes
from ingest.web.asgi import Router
from storage.errors import JournalFailed
from tests.ingest.collector.test_collector import GatedJournal, registered, running


def token(**fields: object) -> Token:
    given = {"id": "0a1b2c3d", "name": "web", "scopes": ("log",), "created": 100}
    return Token(**{**given, "sha256": hashed("zebra"), **fields})  # type: ignore[arg-type]


def book(*tokens: Token) -> TokenBook:
    known = TokenBook()
    known.replace(tokens, 0.0)
    return known


def authorization(text: str) -> bytes:
    return f"Bearer {text}".encode()


GOOD = authorization(bearer("0a1b2c3d", "zebra"))


def test_a_known_token_is_its_scopes() -> None:
    """The scheme is case-insensitive; the token gets the scopes that it was created with."""
    for text in (GOOD, GOOD.replace(b"Bearer", b"bearer")):
        caller = book(token()).caller(text, 200.0)
        assert (caller.token_id, caller.scopes) == ("0a1b2c3d", {"log"})
        caller.require(LOGGING, "this")
        with pytest.raises(Refusal, match="this needs a token with the scope act") as refused:
            caller.require(ACTING, "this")
        assert refused.value.status == 403


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic 0a1b2c3d",
        b"Bearer zebra",
        b"Bearer hr_0a1b2c3d_",
        b"Bearer hr_0a1b2c3d_zebrA",
        b"Bearer hr_0a1b2c3d_zebra2",
        b"Bearer hr_ffffffff_zebra",
        b"Bearer \xff_\xff_\xff",
        GOOD.replace(b"hr_", b"xx_"),
    ],
)
def test_any_other_token_is_401_and_not_repeated(text: bytes | None) -> None:
    """The refusal repeats nothing of the token."""
    with pytest.raises(Refusal) as refused:
        book(token()).caller(text, 200.0)
    assert refused.value.status == 401
    assert "ebr" not in str(refused.value)


def test_a_token_ends_with_its_time_and_its_revocation() -> None:
    """`expires` is the first second in which it is invalid."""
    assert book(token(expires=300)).caller(GOOD, 299.9)
    for ended, wall in ((token(expires=300), 300.0), (token(revoked=150), 200.0)):
        with pytest.raises(Refusal, match=r"expired|revoked"):
            book(ended).caller(GOOD, wall)


def test_who_was_let_in_may_be_shut_out_before_the_answer() -> None:
    """Revocation, expiry or a file without the token do so; no other change does."""
    made = token(expires=2000)
    known = book(made)
    caller = known.caller(GOOD, 1999.0)
    caller.require_live(1999.0)
    with pytest.raises(Refusal, match="expired"):
        caller.require_live(2000.0)
    known.replace([msgspec.structs.replace(made, rate=5.0)], 0.0)
    caller.require_live(1999.0)
    known.replace([msgspec.structs.replace(made, revoked=1500)], 0.0)
    with pytest.raises(Refusal, match="revoked") as refused:
        caller.require_live(1999.0)
    assert refused.value.status == 401
    known.replace([], 0.0)
    with pytest.raises(Refusal, match="an unknown one"):
        caller.require_live(1999.0)
    NOBODY.require_live(1999.0)


def test_once_there_was_a_token_nobody_gets_in_without() -> None:
    """Once there was a token, a request without one is refused, also when all are revoked or the
    file has lost them."""
    assert not book().required
    known = book(token(revoked=150))
    assert known.required
    assert known.live(200.0) == []


def test_a_new_reading_tells_what_changed_and_keeps_what_was_spent() -> None:
    """An unchanged token keeps its caller; created and revoked ones are reported once."""
    known = book(token(rate=1.0))
    caller = known.caller(GOOD, 200.0)
    caller.charge(50)
    other = token(id="ffffffff", name="other")
    assert [(c.what, c.name) for c in known.replace([token(rate=1.0), other], 1.0)] == [
        ("created", "other")
    ]
    assert known.caller(GOOD, 200.0) is caller
    gone = [token(rate=1.0, revoked=180)]
    assert [(c.what, c.name) for c in known.replace(gone, 2.0)] == [
        ("revoked", "web"),
        ("revoked", "other"),
    ]


@given(
    rate=st.floats(0.5, 1e4),
    batches=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 5_000)), max_size=40),
)
def test_nobody_sends_faster_than_the_rate(rate: float, batches: list[tuple[float, int]]) -> None:
    """The requests before any admitted one never exceed the rate and one burst."""
    allowance = Allowance(rate, since=0.0)
    now, sent = 0.0, 0
    for pause, events in batches:
        now += pause
        now += allowance.wait(now)
        assert allowance.wait(now) <= 1e-6
        assert sent <= max(1.0, rate) + rate * now + 1e-6 * (1 + sent)
        allowance.charge(events)
        sent += events


def test_too_fast_is_429_with_the_seconds_to_wait() -> None:
    """A batch is accepted as a whole, and the next request waits for it."""
    caller = book(token(rate=10.0)).caller(GOOD, 200.0)
    require_allowance(caller, 0.0)
    caller.charge(30)
    with pytest.raises(Refusal, match="10 events per second") as refused:
        require_allowance(caller, 0.0)
    assert refused.value.status == 429
    assert refused.value.retry_after == pytest.approx(2.1)
    require_allowance(caller, 2.11)


def test_a_local_caller_publishes_nothing() -> None:
    """Without any token, routes that change the live version are closed."""
    with pytest.raises(Refusal):
        LOCAL.require(PUBLISHING, "publishing")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "../x"}, "token name"),
        ({"scopes": ()}, "got none"),
        ({"scopes": ("log", "root")}, "got root"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"open_episodes": 0}, "open episodes"),
        ({"sha256": "secret"}, "SHA-256"),
    ],
)
def test_a_token_that_makes_no_sense_is_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(TokenError, match=text):
        token(**fields)


# --- the file ------------------------------------------------------------------------------------


def test_what_lies_on_disk_cannot_be_sent(tmp_path: Path) -> None:
    """The file holds a hash, only its owner can read it, and the token itself works."""
    made, text = create_token(tmp_path, "web", ["log", "act"], lives=3600, rate=5, open_episodes=7)
    path = tmp_path / "keys" / "tokens.json"
    secret = text.split("_", 2)[2]
    assert len(secret) >= 43
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_tokens(tmp_path) == [made]
    assert made.expires == made.created + 3600
    caller = book(*load_tokens(tmp_path)).caller(authorization(text), made.created)
    assert (caller.scopes, caller.open_episodes) == ({"log", "act"}, 7)


def test_several_live_at_once_and_a_name_is_used_again(tmp_path: Path) -> None:
    """To rotate, create the next token, switch to it, revoke the last; its record stays."""
    first, _ = create_token(tmp_path, "web", ["log"])
    second, text = create_token(tmp_path, "web-2", ["log"])
    with pytest.raises(TokenError, match="a live token has this name"):
        create_token(tmp_path, "web", ["log"])
    assert revoke_token(tmp_path, "web").id == first.id
    assert revoke_token(tmp_path, first.id).revoked is not None
    third, _ = create_token(tmp_path, "web", ["log"])
    assert [one.id for one in load_tokens(tmp_path)] == [first.id, second.id, third.id]
    assert book(*load_tokens(tmp_path)).caller(authorization(text), second.created)
    with pytest.raises(TokenError, match="there are: web, web-2"):
        revoke_token(tmp_path, "nobody")


def test_an_id_is_no_name_of_another_token(tmp_path: Path) -> None:
    """This keeps a token from hiding the one whose id is its name, also in older files."""
    web, _ = create_token(tmp_path, "web", ["log"])
    with pytest.raises(TokenError, match="got the id of token web"):
        create_token(tmp_path, web.id, ["log"])
    older = msgspec.structs.replace(web, id="0a1b2c3d", name=web.id, created=1)
    path = tmp_path / "keys" / "tokens.json"
    document = msgspec.json.decode(path.read_bytes())
    document["tokens"].insert(0, msgspec.to_builtins(older))
    path.write_bytes(msgspec.json.encode(document))
    assert [revoke_token(tmp_path, web.id).id for _ in range(2)] == [web.id, web.id]
    assert [one.state(0.0) for one in load_tokens(tmp_path)] == ["live", "revoked"]
    assert revoke_token(tmp_path, "0a1b2c3d").name == web.id


def test_tokens_made_at_once_are_all_kept(tmp_path: Path) -> None:
    """Eight processes create one each; the lock keeps them from overwriting each other's."""
    code = (
        "import sys; from pathlib import Path; from ingest.access.key_files import create_token; "
    )
    code += "create_token(Path(sys.argv[1]), sys.argv[2], ['log'])"
    made = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"t{n}"]) for n in range(8)
    ]
    assert [process.wait() for process in made] == [0] * 8
    assert {one.name for one in load_tokens(tmp_path)} == {f"t{n}" for n in range(8)}
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {"tokens.json", "lock"}


def test_a_follower_reads_only_what_changed(tmp_path: Path) -> None:
    """No file, a first file, the same, another; a file that vanished is no change."""
    file = TokenFile(tmp_path)
    assert file.changed() is None
    made, _ = create_token(tmp_path, "web", ["log"])
    assert file.changed() == [made]
    assert file.changed() is None
    gone = revoke_token(tmp_path, "web")
    assert file.changed() == [gone]
    os.unlink(tmp_path / "keys" / "tokens.json")
    assert file.changed() is None


MOVED_BETWEEN = """
import sys
from pathlib import Path
from ingest.server.listening import Access
from ingest.server.options import Listening
from ingest.access.key_files import create_token

root = Path(sys.argv[1])

def move(event, arguments):  # at the moment of the reading, the look is over
    if event == "open" and str(arguments[0]).endswith("tokens.json") and root.exists():
        root.rename(sys.argv[2])

access = Access(root, Listening())
if sys.argv[3] == "known":
    create_token(root, "web", ["log"])
    access.look()
create_token(root, "more", ["log"])
sys.addaudithook(move)
required = access.book.required
access.look()
print(required, access.book.required, root.exists())
"""


@pytest.mark.parametrize(("known", "required"), [("known", "True"), ("none", "False")])
def test_tokens_that_go_while_they_are_read_open_nothing(
    tmp_path: Path, known: str, required: str
) -> None:
    """A root that is moved between the check for its tokens and their reading changes nothing."""
    root = tmp_path / "root"
    root.mkdir()
    command = [sys.executable, "-c", MOVED_BETWEEN, str(root), str(tmp_path / "old"), known]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [required, required, "False"]
    assert "the tokens cannot be reloaded" in done.stderr


def test_tokens_that_go_at_a_start_are_no_open_door(tmp_path: Path) -> None:
    """A start that sees a file of tokens and cannot read it fails: it serves nobody."""
    root = tmp_path / "root"
    create_token(root, "web", ["log"])
    code = MOVED_BETWEEN.partition("access = ")[0] + "sys.addaudithook(move)\n"
    code += "Access(root, Listening())"
    command = [sys.executable, "-c", code, str(root), str(tmp_path / "old")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b'{"tokens": [{}]}',
        b'{"tokens": [], "version": 2}',
        b"\xff",
        b"[" * 100_000,
        json.dumps({"tokens": [{"id": "x"}], "version": 1}).encode(),
    ],
)
def test_a_damaged_file_is_an_error_and_no_open_door(tmp_path: Path, damage: bytes) -> None:
    create_token(tmp_path, "web", ["log"])
    (tmp_path / "keys" / "tokens.json").write_bytes(damage)
    with pytest.raises(TokenError, match=r"tokens\.json"):
        load_tokens(tmp_path)
    file = TokenFile(tmp_path)
    with pytest.raises(TokenError):
        file.changed()
    with pytest.raises(TokenError):  # and it is read again
        file.changed()


# --- what is open to all -------------------------------------------------------------------------


async def healthz(router: Router, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    """Status and body of one `GET /healthz`."""
    sent: list[MutableMapping[str, Any]] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/healthz",
        "raw_path": b"/healthz",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), *headers],
    }

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await router(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_why_a_collector_failed_is_not_for_strangers() -> None:
    """The failure is public; the cause needs a token or, if there are none, a loopback caller."""

    async def main() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            journal.errors = [JournalFailed("EIO of /srv/journal.db")]
            with pytest.raises(CollectorFailed):
                await registered(collector)
            known = TokenBook()
            live = LivePolicies(None, collector.policies)
            router = Routes(collector, live).router(admit=Admission(known, Hosts("127.0.0.1")))
            cause = {"status": "failed", "cause": "EIO of /srv/journal.db"}
            assert await healthz(router) == (503, cause)
            known.replace([token()], 0.0)
            assert await healthz(router) == (503, {"status": "failed"})
            assert await healthz(router, (b"authorization", GOOD)) == (503, cause)

    asyncio.run(main())


# --- hosts and origins ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "host", "known"),
    [
        ("127.0.0.1", "127.0.0.1:8642", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "LOCALHOST:1", True),
        ("127.0.0.1", "app.localhost:8642", True),
        ("127.0.0.1", "[::1]:8642", True),
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "evil.example:8642", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "10.0.0.7:8642", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "localhost:80:80", False),
        ("127.0.0.1", "[::1", False),
        ("127.0.0.1", "user@localhost", False),
        ("127.0.0.1", "localhost.", True),
        ("127.0.0.1", "evil.example#.localhost", False),
        ("127.0.0.1", "evil.example/.localhost", False),
        ("127.0.0.1", "evil..localhost", False),
        ("127.0.0.1", "localhost:", False),
        ("127.0.0.1", "localhost:\u00b2", False),
        ("127.0.0.1", "[::1]:\u00b2", False),
        ("127.0.0.1", "[::1%x]", False),
        ("127.0.0.1", "[::1]x", False),
        ("10.0.0.7", "10.0.0.7:8642", True),
        ("10.0.0.7", "10.0.0.8:8642", False),
        ("0.0.0.0", "10.0.0.8:8642", True),
        ("::", "[fd00::7]:8642", True),
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", "collector.internal:8642", True),
        ("0.0.0.0", "COLLECTOR.internal.", True),
        ("0.0.0.0", "fd00::7", False),
        ("127.0.0.1", "[FD00::7]:8642", True),
        ("127.0.0.1", "shop_collector_1:8642", True),
    ],
)
def test_a_name_that_is_not_the_collectors_is_foreign(bound: str, host: str, known: bool) -> None:
    """A page that pointed its own name at our address still sends that name."""
    hosts = Hosts(bound, ["Collector.internal", "[fd00::7]", "shop_collector_1"])
    assert hosts.known(host) is known
    headers = [(b"host", host.encode("latin-1"))]
    if known:
        hosts.check(headers)
    else:
        with pytest.raises(Refusal, match="--allow-host") as refused:
            hosts.check(headers)
        assert refused.value.status == 403


@pytest.mark.parametrize(
    ("origin", "fine"),
    [
        ("http://localhost:8642", True),
        ("https://LOCALHOST:8642", True),
        ("http://localhost:3000", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
        ("localhost:8642", False),
        ("file://localhost:8642", False),
    ],
)
def test_only_the_collectors_own_page_may_call_it(origin: str, fine: bool) -> None:
    headers = [(b"host", b"localhost:8642"), (b"origin", origin.encode())]
    if fine:
        Hosts("127.0.0.1").check(headers)
    else:
        with pytest.raises(Refusal, match="Origin"):
            Hosts("127.0.0.1").check(headers)


def test_a_header_that_is_there_twice_is_refused() -> None:
    """A header that is there twice is refused: it is unknown which of the two a proxy checked."""
    with pytest.raises(Refusal, match="expected one header host"):
        Hosts("127.0.0.1").check([(b"host", b"localhost"), (b"host", b"localhost")])


SECRET = "zebraZEBRA-0123456789_zebraZEBRA-0123456789"


@pytest.mark.parametrize(
    "pasted",
    [
        f"hr_0a1b2c3d_{SECRET}",
        f"HR_0A1B2C3D_{SECRET.upper()}",
        f"hr%5F0a1b2c3d%5f{SECRET.replace('_', '%5F')}",
        f"hr%255F0a1b2c3d%255F{SECRET.replace('_', '%255F')}",
        f"hr%25255F0a1b2c3d%25255F{SECRET}",
        f"0a1b2c3d_{SECRET}",
    ],
)
def test_a_token_is_masked_however_it_was_pasted(pasted: str) -> None:
    """The masked text shows the token's id, so that the token can be revoked."""
    shown = masked(f'{{"path":"/v1/episodes/{pasted}/end"}}')
    assert "zebra" not in shown.lower()
    assert "0a1b2c3d_***" in shown.lower()
    assert shown.endswith('/end"}')
    assert masked("/v1/episodes/0a1b2c3d_short/end") == "/v1/episodes/0a1b2c3d_short/end"


# --- the client ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hr_a_very-secret\nx", "hr_a_very-secret ", "", "hr_a_secretü"])
def test_a_token_that_no_header_can_carry_is_refused_unseen(text: str) -> None:
    """The error does not contain the token."""
    with pytest.raises(ValueError, match="token: expected") as refused:
        Transport("http://127.0.0.1:9", token=text)
    assert "secret" not in repr(refused.value)
