"""Build the wheel: one package, `headrace`, that contains `ingest`, `policy` and `storage`.

In the repository the four packages are side by side. Installed that way, `storage` and `policy`
would take common names in users' environments. So a wheel contains only `headrace`, and imports of
the three get its prefix. An editable install keeps the repository's layout.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("ingest", "policy", "storage")
_IMPORT = re.compile(r"^(\s*)(from|import) (ingest|policy|storage)\b", re.M)
_QUOTED = re.compile(r"""(["'])((?:ingest|policy|storage)(?:\.\w+)+)""")


def module_names(root: Path) -> frozenset[str]:
    """The dotted names of every module and folder of the three packages under `root`."""
    files = [file for package in PACKAGES for file in (root / package).rglob("*.py")]
    parts = [file.relative_to(root).with_suffix("").parts for file in files]
    return frozenset(".".join(one).removesuffix(".__init__") for one in parts)


def as_installed(source: str, modules: Collection[str]) -> str:
    """Prefix imports, and quoted names of `modules`, with `headrace` in Python source."""

    def quoted(found: re.Match[str]) -> str:
        module = found[2].rpartition(".")[0]
        known = found[2] in modules or ("." in module and module in modules)
        return f"{found[1]}headrace.{found[2]}" if known else found[0]

    return _QUOTED.sub(quoted, _IMPORT.sub(r"\1\2 headrace.\3", source))


def copy_as_installed(root: Path, target: Path) -> None:
    """Write the wheel's package `headrace` to the folder `target`."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    shutil.copytree(root / "headrace", target, ignore=unwanted)
    for package in PACKAGES:
        if not (root / package / "__init__.py").is_file():
            raise FileNotFoundError(f"expected the package {package} in {root}")
        shutil.copytree(root / package, target / package, ignore=unwanted)
    modules = module_names(root)
    for file in target.rglob("*.py"):
        file.write_text(as_installed(file.read_text("utf-8"), modules), "utf-8")


class OnePackage(BuildHookInterface[Any]):
    """Hatchling's hook for the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the renamed copy to the wheel's files."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-wheel-")
        target = Path(self._folder.name) / "headrace"
        copy_as_installed(Path(self.root), target)
        build_data["force_include"][str(target)] = "headrace"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        if version != "editable":
            self._folder.cleanup()
