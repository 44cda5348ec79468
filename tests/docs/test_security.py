"""docs/security.md is run: its tokens, its certificate, its client, its rules."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import trustme

from ingest.access.admission import Hosts
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.docs.test_docs import ROOT, blocks
from tests.storage.verify.test_audit import verified

PAGE = "docs/security.md"


def run(code: list[str], home: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(code, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(loaded: Path, code: str, home: Path) -> str:
    return run(["sh", "-ec", f"PATH={shlex.quote(str(loaded))}:$PATH\n{code}"], home)


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, loaded: Path) -> None:
    """The page's client is accepted with its token over TLS, and no redacted value is on the
    disk."""
    tokens, serve, find, erase = blocks(PAGE, "sh")
    (client,) = blocks(PAGE, "python")
    (rules,) = blocks(PAGE, "json")
    root = tmp_path / "data/run/shop"
    declare(root)
    path = root / "policies/default.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **json.loads(rules)}))
    listed = shell(loaded, tokens, tmp_path)
    assert "Revoked import" in listed
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    (tmp_path / "chain.pem").write_bytes(b"".join(p.bytes() for p in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    words = shlex.split(serve.replace("\\\n", " "))[2:]
    for name, value in (("--host", "127.0.0.1"), ("--port", None), ("--root", None)):
        at = words.index(name)
        words[at : at + 2] = [] if value is None else [name, value]
    for file in ("chain.pem", "key.pem"):
        words[words.index(file)] = str(tmp_path / file)
    with CollectorProcess(root, options=words, ca=tmp_path / "ca.pem") as process:
        code = client.replace("https://localhost:8642", f"https://localhost:{process.port}")
        output = run([str(loaded / "python"), "-c", code], tmp_path)
        assert re.match("[34] events acknowledged", output)  # a queued step absorbs its reward
        token = (tmp_path / "web.token").read_text().strip()
        process.settle(1, authorization=f"Bearer {token}")
        assert process.stop() == 0
    (row,) = shard_rows(root)
    assert json.loads(row["infos"]) == {"position": 3}
    stand_in = shell(loaded, find, tmp_path).strip()
    assert json.loads(row["tags"]) == {"user": stand_in, "experiment": "b"}
    kept = b"".join(one.read_bytes() for one in root.rglob("*") if one.is_file())
    assert b"alice@example.com" not in kept
    assert stand_in in journal_text(root)  # on its free pages
    done = shell(loaded, erase.replace("erase --root", "erase --yes-all --root"), tmp_path)
    assert "To be removed: 1 row" in done
    assert done.endswith("Nothing was found\n")
    assert stand_in not in journal_text(root)
    report = verified(root)
    assert (report.findings, report.erased) == ((), 1)
    assert list(root.glob("shards/*/*.parquet*")) == []


def journal_text(root: Path) -> str:
    return b"".join(path.read_bytes() for path in (root / "journal").iterdir()).decode("latin-1")


def test_the_host_that_the_page_allows_is_let_in() -> None:
    """The page's `--allow-host`, in addition to any address, and no other name."""
    hosts = Hosts("0.0.0.0", ["collector.example.com"])
    assert hosts.known("collector.example.com:8642")
    assert hosts.known("10.1.2.3:8642")
    assert not hosts.known("example.com")
