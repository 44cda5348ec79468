"""Make a release of the committed files: `make release`.

    python release.py [--tag]

It builds the wheel and the sdist into dist/, and installs each into fresh environments of every
supported Python version, where it logs, reads, publishes and acts. It writes a CycloneDX SBOM of an
installation to dist/, and refuses licences that are not known to be compatible. With --tag it tags
the commit `v{version}`. Nothing is uploaded. Each step prints its result; the first failure ends
the release.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.project.environments import PINS, PROJECT, ROOT, interpreter

VERSION: str = PROJECT["version"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
LOOP = ROOT / "tests" / "project" / "installed_loop.py"
LISTER = "cyclonedx-bom==7.5.0"  # makes the SBOM, in its own environment

ALLOWED = frozenset(
    [
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Python-2.0",
        "Python-2.0.1",
        "Unlicense",
        "Zlib",
        "CC0-1.0",
        "WTFPL",
    ]
)
"""SPDX names of licences that dependencies of an Apache-2.0 project may have without conditions.

MPL-2.0 has conditions for its own files only.
"""

SPELT = {
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "bsd license": "BSD-3-Clause",
    "bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "mit license": "MIT",
    "the mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "isc license (iscl)": "ISC",
    "matplotlib": "PSF-2.0",  # the PSF licence with other names
}
"""Names that packages use instead of the SPDX name, in lower case."""


class NotReleased(Exception):
    """The reason why this cannot be released."""


def say(text: str) -> None:
    print(text, flush=True)


def checked(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(map(str, command))
        raise NotReleased(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def require_ready(changelog: str, *, dirty: str, tags: str, day: str) -> None:
    """Raise NotReleased unless this commit, of a day like 2026-01-31, can be version VERSION."""
    if dirty:
        raise NotReleased(f"expected everything to be committed, got\n{dirty}")
    if f"v{VERSION}" in tags.split():
        raise NotReleased(f"v{VERSION} is tagged already: raise `version` in pyproject.toml")
    entry = f"## [{VERSION}] - {day}"  # the day of the commit that is tagged
    if entry not in changelog.splitlines():
        raise NotReleased(f"expected the entry '{entry}' in CHANGELOG.md")


def built(folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist of this tree."""
    checked(sys.executable, "-m", "build", "-q", "--no-isolation", "-o", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    named = f"headrace-{VERSION}"
    if not (wheel.name.startswith(f"{named}-") and sdist.name == f"{named}.tar.gz"):
        raise NotReleased(f"expected files named {named}, got {wheel.name} and {sdist.name}")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(name))["Requires-Python"]
    if asked != PROJECT["requires-python"]:
        raise NotReleased(f"expected Python {PROJECT['requires-python']} of the wheel, got {asked}")
    return wheel, sdist


def tried(package: Path, version: str, folder: Path) -> Path:
    """Install into a fresh environment, and run the loop there; return the environment's python."""
    found = interpreter(version)
    if found is None:
        raise NotReleased(f"Python {version} is claimed, and not installed")
    home = folder / f"{version}-{package.suffix[1:]}"
    checked(found, "-m", "venv", home)
    python = home / "bin" / "python"
    with_collector = f"headrace[collector] @ {package.as_uri()}"
    checked(python, "-m", "pip", "install", "-q", "-c", PINS, with_collector, cwd=folder)
    place = folder / f"loop-{home.name}"
    place.mkdir()
    result = json.loads(checked(python, LOOP, place / "root", cwd=place).splitlines()[-1])
    say(f"{package.name}: the loop on Python {result['python']}, {result['rows']} rows")
    return python


def listed(wheel: Path, folder: Path) -> dict[str, Any]:
    """The SBOM of an installation of the wheel with `all`, at the tested versions."""
    lister, home = folder / "lister", folder / "all"
    for place, asked in ((lister, LISTER), (home, f"headrace[all] @ {wheel.as_uri()}")):
        checked(sys.executable, "-m", "venv", "--without-pip", place)
        pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
        checked(*pip, "install", "-q", "-c", PINS, asked, cwd=folder)
    command = lister / "bin" / "cyclonedx-py"
    options = ("--output-reproducible", "--of", "JSON", "--pyproject", ROOT / "pyproject.toml")
    document: dict[str, Any] = json.loads(
        checked(command, "environment", *options, home / "bin" / "python")
    )
    return document


def choices(component: Mapping[str, Any]) -> Iterator[frozenset[str]]:
    """The alternative licences of a component, by SPDX name if known; a set applies as a whole."""
    for one in component.get("licenses", ()):
        licence = (
            one.get("expression") or one["license"].get("id") or one["license"].get("name", "")
        )
        if "expression" not in one:
            name = licence.rpartition("::")[2].strip()  # of a classifier
            yield frozenset({SPELT.get(name.lower(), name)})
        else:  # with any AND, all of the expression's licences must be allowed
            names = re.sub(r"\bWITH\s+\S+|[()]", " ", licence)
            parts = [names.replace(" OR ", " AND ")] if " AND " in names else names.split(" OR ")
            yield from (frozenset(map(str.strip, part.split(" AND "))) for part in parts)


def require_licences(document: Mapping[str, Any]) -> None:
    """Raise NotReleased for a component without a licence that is known to be compatible."""
    refused = []
    for component in document["components"]:
        if component["name"] == "headrace":
            continue
        options = list(choices(component))
        if not any(names <= ALLOWED for names in options):
            found = " or ".join(" and ".join(sorted(names)) for names in options) or "none"
            refused.append(f"{component['name']} {component['version']}: {found}")
    if refused:
        raise NotReleased("licences that are not known to go with ours:\n" + "\n".join(refused))


def release(*, tag: bool) -> None:
    require_ready(
        (ROOT / "CHANGELOG.md").read_text(),
        dirty=checked("git", "status", "--porcelain"),
        tags=checked("git", "tag", "--list"),
        day=checked("git", "log", "-1", "--format=%cs").strip(),
    )
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    wheel, sdist = built(dist)
    with tempfile.TemporaryDirectory() as place:
        for package in (wheel, sdist):
            for version in PYTHONS:
                tried(package, version, Path(place))
        document = listed(wheel, Path(place))
    require_licences(document)
    bom = dist / f"headrace-{VERSION}.cdx.json"
    bom.write_text(json.dumps(document, indent=1) + "\n")
    say(f"{bom.name}: {len(document['components'])} packages, each with a known licence")
    for path in (wheel, sdist, bom):
        say(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}")
    if tag:
        checked("git", "tag", "-a", f"v{VERSION}", "-m", f"Headrace {VERSION}")
        say(f"tagged v{VERSION}")


if __name__ == "__main__":
    words = argparse.ArgumentParser(description="Make a release of what is committed.")
    words.add_argument("--tag", action="store_true", help="name the commit v{version} at the end")
    try:
        release(tag=words.parse_args().tag)
    except NotReleased as error:
        sys.exit(f"no release: {error}")
