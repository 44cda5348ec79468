"""The conditions that stop a release; `make release` itself builds environments for minutes."""

from __future__ import annotations

import re
from typing import Any

import pytest

import release
from release import VERSION, NotReleased, choices, require_licences, require_ready
from tests.project.environments import ROOT

DAY = "2026-01-01"
ENTRY = f"# Changelog\n\n## [{VERSION}] - {DAY}\n"


def component(*licences: dict[str, Any]) -> dict[str, Any]:
    return {"name": "some", "version": "1.0", "licenses": list(licences)}


def named(name: str) -> dict[str, Any]:
    return {"license": {"name": name}}


def test_a_version_is_released_once_and_from_a_commit_that_tells_of_it() -> None:
    require_ready(ENTRY, dirty="", tags="v0.0.1\n", day=DAY)
    with pytest.raises(NotReleased, match="to be committed"):
        require_ready(ENTRY, dirty=" M README.md", tags="", day=DAY)
    with pytest.raises(NotReleased, match="tagged already"):
        require_ready(ENTRY, dirty="", tags=f"v0.0.1\nv{VERSION}\n", day=DAY)
    for changelog, day in (("# Changelog\n\n## [Unreleased]\n", DAY), (ENTRY, "2026-01-02")):
        with pytest.raises(NotReleased, match=rf"{day}' in CHANGELOG\.md"):
            require_ready(changelog, dirty="", tags="", day=day)


def test_the_changelog_has_each_heading_once_per_release() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert len(releases) >= 2
    for entry in releases:
        headings = re.findall(r"^### .*$", entry, re.MULTILINE)
        assert headings == list(dict.fromkeys(headings))


@pytest.mark.parametrize(
    ("licence", "names"),
    [
        (named("License :: OSI Approved :: BSD License"), [{"BSD-3-Clause"}]),
        ({"license": {"id": "MIT"}}, [{"MIT"}]),
        ({"expression": "Apache-2.0 OR BSD-3-Clause"}, [{"Apache-2.0"}, {"BSD-3-Clause"}]),
        ({"expression": "(MIT OR ISC) AND 0BSD"}, [{"MIT", "ISC", "0BSD"}]),
        ({"expression": "Apache-2.0 WITH LLVM-exception"}, [{"Apache-2.0"}]),
        (named("Ours alone"), [{"Ours alone"}]),
    ],
)  # fmt: skip
def test_licences_are_read_however_a_package_tells_them(
    licence: dict[str, Any], names: list[set[str]]
) -> None:
    assert list(choices(component(licence))) == names


def test_a_package_without_a_known_licence_is_named() -> None:
    sound = component(named("GPL-3.0-only"), {"license": {"id": "MIT"}})  # one may choose
    require_licences({"components": [sound, {"name": "headrace", "version": VERSION}]})
    for licences in ((), (named("GPL-3.0-only"),), ({"expression": "MIT AND GPL-3.0-only"},)):
        with pytest.raises(NotReleased, match=r"some 1\.0"):
            require_licences({"components": [component(*licences)]})


def test_every_python_that_is_claimed_is_tried() -> None:
    assert release.PYTHONS == ["3.11", "3.12", "3.13"]
