#!/usr/bin/env python3
"""Build the wheels of cadenza-client, cadenza-agent and cadenza from this tree.

It needs setuptools, make and a C compiler.

Usage: packaging/wheels.py FOLDER

Each file is in one wheel: cadenza-client has what the client imports, cadenza-agent what else the agent imports, and
cadenza the rest. The library in C that jobs preload is in the agent's wheel, which therefore fits this kind of machine
only. The metadata are in the setup.cfg of the folders here; the version is that of the tree's setup.cfg.

Two trees with the same files give the same bytes: each file has the date of Debian's changelog, or SOURCE_DATE_EPOCH,
and a mode of its own, whatever the umask.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import os
import re
import shutil
import stat
import string
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "profiler", "sidecar", "slurm_plugin")
FOUNDATIONS = {"client": "cadenza.sidecar.client", "agent": "cadenza.sidecar.agent"}
"""Distributions that the later ones depend on, and the package that each is there for."""


MACHINE = sysconfig.get_platform()
LIBRARY = ROOT / "sidecar" / "agent" / "addresses" / "libcadenza-addresses.so"


def imported(file: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports anywhere; a ``from`` yields those of objects, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (name.value for name in node.args if isinstance(name, ast.Constant))


def modules() -> dict[str, Path]:
    """Return the tree's modules by name; a package's module is its ``__init__.py``."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    names = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    return {
        ".".join(("cadenza", *(parts[:-1] if parts[-1] == "__init__" else parts))): file
        for parts, file in zip(names, files, strict=True)
    }


def distributions() -> dict[str, set[Path]]:
    """Return the files of each distribution, the lowest first."""
    known, taken = modules(), set[str]()
    found: dict[str, set[Path]] = {}
    for name, package in FOUNDATIONS.items():
        needed: set[str] = set()
        waiting = [module for module in known if module.startswith(package)]
        while waiting:
            module = waiting.pop()
            if module in known and module not in needed | taken:
                needed.add(module)
                waiting += [module.rpartition(".")[0], *imported(known[module])]
        taken |= needed
        found[name] = {known[module] for module in needed}
    found["cadenza"] = {file for module, file in known.items() if module not in taken}
    found["agent"].add(LIBRARY)
    # Data files belong to the last distribution, the mark of a typed package to its __init__.py.
    for file in (file for pattern in ("py.typed", "data/*", "templates/*") for file in tree_files(pattern)):
        owner = next((name for name, files in found.items() if file.with_name("__init__.py") in files), "cadenza")
        found[owner].add(file)
    return found


def tree_files(pattern: str) -> Iterator[Path]:
    """Yield the files of the packages that match a pattern."""
    for package in PACKAGES:
        yield from (file for file in sorted((ROOT / package).rglob(pattern)) if file.is_file())


def build(name: str, files: set[Path], folder: Path) -> str:
    """Build a distribution's wheel from a copy of its files; return the wheel's name."""
    tree = configparser.ConfigParser()
    tree.read(ROOT / "setup.cfg")
    with tempfile.TemporaryDirectory() as stage:
        for file in files:
            copy = Path(stage, "cadenza", file.relative_to(ROOT))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        for file in ("LICENSE", "README.md"):
            shutil.copy(ROOT / file, stage)
        for copy in Path(stage).rglob("*"):
            copy.chmod(0o755 if copy.stat().st_mode & stat.S_IXUSR else 0o644)
        metadata = string.Template((ROOT / "packaging" / name / "setup.cfg").read_text())
        Path(stage, "setup.cfg").write_text(metadata.substitute(version=tree["metadata"]["version"], machine=MACHINE))
        with contextlib.chdir(stage), contextlib.redirect_stdout(sys.stderr):
            return build_meta.build_wheel(str(folder))


def released() -> int:
    """Return the date of the newest entry of Debian's changelog, in Unix seconds; dpkg takes the same one."""
    (date, *_) = re.findall(r"^ -- .+>  (.+)$", (ROOT / "packaging/debian/changelog").read_text(), re.MULTILINE)
    return int(parsedate_to_datetime(date).timestamp())


def main() -> None:
    """Build all wheels into the folder that the command line names."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(released()))
    os.umask(0o022)
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["make", "--silent", "-C", str(LIBRARY.parent)], check=True)
    for name, files in distributions().items():
        sys.stdout.write(f"{folder / build(name, files, folder)}\n")


if __name__ == "__main__":
    main()
