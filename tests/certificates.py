"""Certificates of a private authority, for tests with TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass
class Certificates:
    cert: Path
    key: Path
    ca: Path

    @property
    def options(self) -> list[str]:
        """The options of `collect` for this certificate and key."""
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key)]


def certify(folder: Path, *names: str) -> Certificates:
    """A new authority and its certificate for these names, or for this machine."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(*(names or ("127.0.0.1", "localhost", "::1")))
    made = Certificates(folder / "chain.pem", folder / "key.pem", folder / "ca.pem")
    made.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    made.key.write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(made.ca)
    return made
