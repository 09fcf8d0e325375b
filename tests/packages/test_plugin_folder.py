"""The SPANK plugin goes to the folder in which the Slurm of a system looks for plugins, also where a site builds it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SPANK = Path(__file__).resolve().parents[2] / "slurm_plugin" / "spank"
FOLDERS = {
    "Debian's own packages": "lib/x86_64-linux-gnu/slurm-wlm",
    "Slurm's debian/, as on Ubuntu": "lib/x86_64-linux-gnu/slurm",
    "Slurm's slurm.spec, as on Rocky": "lib64/slurm",
    "make install": "lib/slurm",
}


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_the_plugin_is_installed_where_this_slurm_looks(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    words = ["make", "--dry-run", "--no-print-directory", f"--directory={SPANK}", f"SLURM_PREFIX={tmp_path}", "install"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert f"install -D -m 755 cadenza.so {tmp_path / folder}/cadenza.so" in shown
