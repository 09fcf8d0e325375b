"""A package is not removed while Slurm's files need its files: slurmctld would not start the next time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS, SCRIPT = "cadenza-slurm26.05", "/usr/share/cadenza/job_submit.lua"
NEEDED = [
    (PLUGINS, "job_submit.lua", SCRIPT),
    (PLUGINS, "cli_filter.lua", "/usr/share/cadenza/../cadenza/job_submit.lua"),
    (PLUGINS, "job_submit.lua", f'-- ours\ndofile("{SCRIPT}")\n'),
    (PLUGINS, "slurm.conf", "PlugStackConfig=/usr/share/cadenza/plugstack.conf\n"),
    (PLUGINS, "plugstack.conf", "required cadenza.so wait=3\n"),
    (PLUGINS, "plugstack.conf.d/site.conf", "optional /usr/lib/slurm/cadenza.so\n"),
    ("cadenza", "slurm.conf", "HealthCheckProgram=/usr/bin/cadenza\n"),
    ("cadenza-agent", "slurm.conf", "Prolog=/usr/bin/cadenza-agent\n"),
]
FREE = [
    (PLUGINS, "plugstack.conf.d/cadenza.conf", "optional cadenza.so\n"),
    (PLUGINS, "job_submit.lua", f'-- dofile("{SCRIPT}")\n'),
    (PLUGINS, "slurm.conf", f"# a copy of {SCRIPT}\nJobSubmitPlugins=lua\n"),
    (PLUGINS, "slurm.conf", "HealthCheckProgram=/usr/bin/cadenza\n"),
    ("cadenza", "slurm.conf", "Prolog=/usr/bin/cadenza-agent\n"),
]


def ran(tmp_path: Path, package: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a package's script as dpkg and rpm do; Slurm's files are in tmp_path."""
    text = (ROOT / "packaging/prerm").read_text().replace("PACKAGE", package)
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    return subprocess.run(
        ["sh", "-c", text, "prerm", *words], env=environment, capture_output=True, text=True, check=False
    )


def put(tmp_path: Path, name: str, text: str) -> Path:
    """Write a file of Slurm's, or make it a link where the text is a path."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if text.startswith("/"):
        path.symlink_to(text)
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize(("package", "name", "text"), NEEDED)
def test_a_package_stays_while_slurm_needs_it(tmp_path: Path, package: str, name: str, text: str) -> None:
    path = put(tmp_path, name, text)
    for words in (("remove",), ("0",)):
        refused = ran(tmp_path, package, *words)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"{package}: Slurm needs it")
        assert str(path) in refused.stderr
    for words in (("upgrade", "0.2.0"), ("1",), ("remove", "for", "cadenza-slurm26.11", "0.1.0")):
        assert ran(tmp_path, package, *words).returncode == 0
    path.unlink()
    assert ran(tmp_path, package, "remove").returncode == 0


@pytest.mark.parametrize(("package", "name", "text"), FREE)
def test_a_package_goes_that_slurm_starts_without(tmp_path: Path, package: str, name: str, text: str) -> None:
    put(tmp_path, name, text)
    done = ran(tmp_path, package, "remove")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_copy_of_our_script_needs_no_package(tmp_path: Path) -> None:
    put(tmp_path, "job_submit.lua", (ROOT / "slurm_plugin/lua/job_submit.lua").read_text())
    assert ran(tmp_path, PLUGINS, "remove").returncode == 0
