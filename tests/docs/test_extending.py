"""docs/extending.md, followed literally in a copy of the tree: files written, lines inserted, commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("policies", "profiler", "sidecar", "slurm_plugin")
COPIED = (*PACKAGES, "examples/simulate", "setup.cfg", "tests/conftest.py", "tests/policies")
FENCE = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One code block of the page."""

    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    return [Block(*found) for found in FENCE.findall((ROOT / "docs/extending.md").read_text())]


def sections() -> list[str]:
    return re.split(r"^## ", (ROOT / "docs/extending.md").read_text(), flags=re.MULTILINE)[1:]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the tree in which ``cadenza`` and ``python`` are those of the copy."""
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.o"))
        else:
            shutil.copy(source, target)
    (tmp_path / "src/cadenza").mkdir(parents=True)
    for name in PACKAGES:
        (tmp_path / "src/cadenza" / name).symlink_to(tmp_path / name)
    scripts = {
        "cadenza": f'exec {sys.executable} -m cadenza.slurm_plugin.cli "$@"',
        "python": f'exec {sys.executable} "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, line in scripts.items():
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
    return tmp_path


def follow(tree: Path, block: Block) -> str:
    """Do what a block says; return what its commands print."""
    if block.language == "bash":
        path = f"{tree / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tree / "src"), "COLUMNS": "200"}
        command = ["bash", "-euc", block.text]
        result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout
    file, _, table = block.title.partition(": ")
    if table == "import":
        lines = (tree / file).read_text().splitlines(keepends=True)
        start = next(
            number for number, line in enumerate(lines) if line.startswith("from cadenza") and line > block.text
        )
        (tree / file).write_text("".join([*lines[:start], block.text, *lines[start:]]))
    elif table:
        lines = (tree / file).read_text().splitlines(keepends=True)
        start = next(number for number, line in enumerate(lines) if re.match(rf"{table}\b.*\($", line))
        (tree / file).write_text("".join([*lines[: start + 1], block.text, *lines[start + 1 :]]))
    else:
        assert not (tree / file).exists(), f"{file}: the page takes it for new"
        (tree / file).write_text(block.text)
    return ""


def test_every_block_can_be_followed():
    assert all(block.language == "bash" or block.title for block in blocks())


@pytest.mark.slow
@pytest.mark.parametrize("section", sections(), ids=lambda text: text.partition("\n")[0].replace(" ", "_"))
def test_the_new_name_is_listed_and_simulated(section: str, tree: Path):
    made = [Block(*found) for found in FENCE.findall(section)]
    printed = "".join(follow(tree, block) for block in made)
    function = next(block.text for block in made if block.title.startswith("policies/"))
    name = re.findall(r"^def (\w+)", function, re.MULTILINE)[0]
    listed = any("Entry(" in block.text for block in made)
    assert not listed or re.search(rf"\b{name}\b", printed.partition("passed")[0]), printed
    assert "1 passed" in printed
    assert "jobs" in printed
    if len(migrations := re.findall(r'"migrations": ?(\d+)', printed)) > 1:
        assert int(migrations[0]) > int(migrations[1])


@pytest.mark.slow
def test_the_page_keeps_to_the_style(tree: Path):
    for block in blocks():
        if block.language == "python":
            follow(tree, block)
    files = [block.title for block in blocks() if block.title.startswith("policies/") and ": " not in block.title]
    shutil.copy(ROOT / "ruff.toml", tree)
    ruff = Path(sys.executable).with_name("ruff")
    subprocess.run(
        [ruff, "check", "--quiet", "policies/registry.py", "policies/sharing/pipeline.py", *files], cwd=tree, check=True
    )
