"""The site builds: no dead link, no page outside the navigation, nothing loaded from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("material", reason="needs the extra `docs`: make docs")
pytestmark = pytest.mark.slow


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_site_builds_and_has_its_generated_pages(tmp_path: Path):
    built = build(tmp_path)
    assert built.returncode == 0, built.stderr
    assert "partitions" in (tmp_path / "reference/settings.html").read_text()
    assert "cadenza sweep run" in (tmp_path / "reference/commands.html").read_text()
    assert (tmp_path / "images/lease-states.svg").exists()
    assert "Content-Security-Policy" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("fault", ["a dead link", "an orphan page", "a foreign picture"])
def test_a_fault_fails_the_build(tmp_path: Path, fault: str):
    docs = tmp_path / "docs"
    subprocess.run(["cp", "-r", ROOT / "docs", docs], check=True)
    hooks = docs / "hooks.py"
    hooks.write_text(re.sub(r"^ROOT = .*$", f"ROOT = Path({str(ROOT)!r})", hooks.read_text(), flags=re.MULTILINE))
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    if fault == "an orphan page":
        (docs / "orphan.md").write_text("# Orphan\n")
    else:
        text = "[gone](gone.md)" if fault == "a dead link" else "![x](https://example.org/x.png)"
        with (docs / "get-started.md").open("a") as page:
            page.write(f"\n{text}\n")
    built = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert built.returncode != 0
    assert {"a dead link": "gone.md", "an orphan page": "orphan.md", "a foreign picture": "example.org"}[
        fault
    ] in built.stderr
