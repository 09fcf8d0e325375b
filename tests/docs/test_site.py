"""The site builds: no dead link, no page outside the navigation, nothing loaded from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "report"))
from browser import Browser

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("material", reason="needs the extra `docs`: make docs")
pytestmark = pytest.mark.slow


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_builds_and_has_its_generated_pages(site: Path):
    assert "partitions" in (site / "reference/settings.html").read_text()
    commands = (site / "reference/commands.html").read_text()
    assert "cadenza sweep run" in commands
    assert "load-sweep=FROM:TO:STEP" in commands, "the keys of --set"
    assert "policies/sharing/preemption" in (site / "reference/packages.html").read_text()
    assert "gittins" in (site / "reference/policies.html").read_text()
    measured = (site / "measurements.html").read_text()
    assert "<!-- records" not in measured
    assert "B speed of 40960 MiB in tensors of 65536 KiB" in measured
    assert (site / "images/lease-states.svg").exists()
    assert "Content-Security-Policy" in (site / "index.html").read_text()


@pytest.mark.browser
def test_the_search_works_from_a_folder_and_pages_fit_a_phone(site: Path, tmp_path: Path):
    with Browser(tmp_path / "profile") as browser:
        browser.look_like(width=390, height=800)
        asked, troubles = browser.open(site / "index.html")
        assert troubles == []
        assert all(address.startswith(("file:", "data:", "blob:")) for address in asked)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        browser.look_like(width=390, height=800, scheme="dark")
        browser.open(site / "index.html")
        assert browser.evaluate("document.body.dataset.mdColorScheme") == "slate", "a light visit before does not stay"
        words = """new Promise((found, missed) => {
            document.querySelector("#__search").click();
            const box = document.querySelector("input.md-search__input");
            box.value = "fair share";
            box.dispatchEvent(new Event("keyup"));
            const end = Date.now() + 30000;
            const look = () => {
                const first = document.querySelector(".md-search-result__item a");
                if (first) found(first.textContent);
                else if (Date.now() > end) missed("nothing found");
                else setTimeout(look, 50);
            };
            look();
        })"""
        assert browser.evaluate(words) in {"Questions", "What happens to fair share and QOS?"}


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
