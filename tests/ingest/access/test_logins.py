"""A browser's login: a cookie that reads what its token may read, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import urllib3

from ingest.access import logins
from ingest.access.admission import Admission, Hosts
from ingest.access.key_files import create_token, revoke_token
from ingest.access.tokens import ANY, LOGGING, NOBODY_NEEDED, READING, Token, TokenBook, hashed
from ingest.protocol.errors import Refusal
from tests.collector_process import CollectorProcess, declare

JSON = {"Content-Type": "application/json"}


class Browser:
    """Requests as a browser sends them, whose jar is one header."""

    def __init__(self, address: str) -> None:
        self.address, self.cookie = address, ""
        self._pool = urllib3.PoolManager(retries=False)

    def send(
        self, method: str, path: str, body: str | None = None, **headers: str
    ) -> urllib3.BaseHTTPResponse:
        given = {**headers, **({"Cookie": self.cookie} if self.cookie else {})}
        return self._pool.request(method, self.address + path, body=body, headers=given)

    def log_in(self, token: str, origin: str | None = "own") -> urllib3.BaseHTTPResponse:
        own = {"Origin": self.address} if origin == "own" else {"Origin": origin} if origin else {}
        return self.send("POST", "/login", f'{{"token": "{token}"}}', **JSON, **own)


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CollectorProcess, str]]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    token = create_token(root, "wall", ["log"])[1]
    create_token(root, "other", ["admin"])
    with CollectorProcess(root) as process:
        yield process, token


def test_a_token_is_asked_for_once_and_then_a_cookie_reads(
    collector: tuple[CollectorProcess, str],
) -> None:
    """The cookie is for this collector alone, unseen by scripts, and not the token."""
    process, token = collector
    browser = Browser(process.address)
    asked = browser.send("GET", "/")
    assert (asked.status, b"<form id=login>" in asked.data) == (401, True)
    assert b"default" not in asked.data.replace(b"preventDefault", b""), "it shows nothing else"
    done = browser.log_in(token)
    assert (done.status, done.data) == (204, b"")
    value, *rules = done.headers["set-cookie"].split("; ")
    assert rules == ["Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict"]
    assert token.rpartition("_")[2] not in value
    assert value.startswith(f"headrace_{process.port}=")
    browser.cookie = f"a=b; {value}"
    page = browser.send("GET", "/")
    assert (page.status, b"What needs attention?" in page.data) == (200, True)
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert browser.send("HEAD", "/").status == 200
    assert browser.send("GET", "/v1/status").status == 200


def test_a_cookie_changes_nothing_and_reads_no_more_than_its_token(
    collector: tuple[CollectorProcess, str],
) -> None:
    """Not even what its token may change: every route but GET needs the token itself."""
    process, token = collector
    browser = Browser(process.address)
    value = browser.log_in(token).headers["set-cookie"].partition(";")[0]
    browser.cookie = value
    own = {**JSON, "Origin": process.address}
    paths = ("/v1/episodes", "/v1/events", "/v1/erase", "/v1/policies/default/rollback")
    for path in paths:
        assert browser.send("POST", path, "{}", **own).status == 401, path
    for path in ("/v1/ledger", "/v1/policies/default/weights", "/v1/policies/default/versions"):
        assert browser.send("GET", path).status == 403, path
    secret = value.partition("=")[2]
    for bearer in (secret, f"hr_{secret.replace('.', '_')}"):
        answer = browser.send("POST", "/v1/episodes", "{}", Authorization=f"Bearer {bearer}", **own)
        assert answer.status == 401, "a stolen cookie is no token"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", None, "https://evil.example:8642"]
)
def test_another_page_cannot_log_a_browser_in(
    collector: tuple[CollectorProcess, str], origin: str | None
) -> None:
    process, token = collector
    answer = Browser(process.address).log_in(token, origin)
    assert (answer.status, "set-cookie" in answer.headers) == (403, False)


def test_a_cookie_that_was_planted_is_not_taken_up(
    collector: tuple[CollectorProcess, str],
) -> None:
    """A login answers with a cookie of its own, whatever the browser had; false ones are refused,
    a changed one, one of another token's id, and a form that no collector makes."""
    process, token = collector
    browser = Browser(process.address)
    good = browser.log_in(token).headers["set-cookie"].partition(";")[0]
    name, _, value = good.partition("=")
    head, until, signature = value.split(".")
    for wrong in (
        "planted",
        f"{head}.{int(until) + 60}.{signature}",
        f"{head}.{until}.{'0' * 64}",
        f"00000000.{until}.{signature}",
        "",
    ):
        browser.cookie = f"{name}={wrong}"
        assert browser.send("GET", "/v1/status").status == 401, wrong
        assert browser.send("GET", "/").status == 401, wrong
        fresh = browser.log_in(token).headers["set-cookie"].partition(";")[0]
        assert wrong not in fresh or not wrong
    assert browser.log_in("hr_00000000_wrong").status == 401
    assert browser.send("POST", "/login", "token=x", Origin=process.address).status in (400, 415)


def known(**fields: object) -> tuple[TokenBook, Token]:
    given = {"id": "0a1b2c3d", "name": "web", "scopes": ("log",), "created": 100, **fields}
    token = Token(**{**given, "sha256": hashed("zebra")})  # type: ignore[arg-type]
    book = TokenBook()
    book.replace([token], 0.0)
    return book, token


def test_a_login_ends_by_itself_and_with_its_token() -> None:
    now = [1000.0]
    book, _ = known(expires=1000 + 3600)
    admission = Admission(book, Hosts("127.0.0.1"), wall=lambda: now[0])
    headers = {b"host": b"127.0.0.1:8642", b"origin": b"http://127.0.0.1:8642"}
    cookie = admission.log_in(headers, "hr_0a1b2c3d_zebra")
    assert "Max-Age=3600" in cookie, "no longer than its token"

    def read(needed: frozenset[str] = LOGGING, method: str = "GET") -> str:
        lines = [(b"host", b"127.0.0.1:8642"), (b"cookie", cookie.partition(";")[0].encode())]
        scope = {"method": method, "path": "/", "headers": lines}
        return admission(scope, needed).token_id

    assert read() == read(ANY) == "0a1b2c3d"
    assert read(NOBODY_NEEDED) == "", "a probe needs no login"
    with pytest.raises(Refusal, match="needs a token with the scope weights:read"):
        read(READING)
    with pytest.raises(Refusal, match="expected a token"):
        read(method="POST")
    now[0] = 1000.0 + 3600
    with pytest.raises(Refusal, match="the login is over"):
        read()
    book, _ = known()
    admission.book = book
    cookie = admission.log_in(headers, "hr_0a1b2c3d_zebra")
    now[0] += logins.SECONDS - 1
    assert read() == "0a1b2c3d"
    now[0] += 1
    with pytest.raises(Refusal, match="the login is over"):
        read()


def test_over_tls_the_cookie_is_secure_and_belongs_to_its_host() -> None:
    book, _ = known()
    admission = Admission(book, Hosts("0.0.0.0", ["example.com"]), wall=lambda: 1000.0)
    headers = {b"host": b"example.com", b"origin": b"https://example.com"}
    cookie = admission.log_in(headers, "hr_0a1b2c3d_zebra")
    assert re.match(r"__Host-headrace=\S+; Path=/; .*; Secure$", cookie)
    value = cookie.partition(";")[0].encode()
    lines = [(b"host", b"example.com"), (b"cookie", value)]
    assert admission({"method": "GET", "path": "/", "headers": lines}, ANY).token_id == "0a1b2c3d"
    lines[1] = (b"cookie", b"headrace=of.before.TLS; " + value)
    assert admission({"method": "GET", "path": "/", "headers": lines}, ANY).token_id == "0a1b2c3d"
    lines[0] = (b"host", b"example.com:8643")
    with pytest.raises(Refusal, match="expected a token"):
        admission({"method": "GET", "path": "/", "headers": lines}, ANY)


def test_a_revoked_token_ends_its_logins(collector: tuple[CollectorProcess, str]) -> None:
    process, _ = collector
    token = create_token(process.root, "gone", ["log"])[1]
    browser = Browser(process.address)
    while (done := browser.log_in(token)).status != 204:  # until the new token is known
        assert done.status == 401
    browser.cookie = done.headers["set-cookie"].partition(";")[0]
    assert browser.send("GET", "/").status == 200
    revoke_token(process.root, "gone")
    while browser.send("GET", "/").status == 200:
        pass
    assert browser.send("GET", "/v1/status").status == 401
