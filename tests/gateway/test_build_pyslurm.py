"""The adapted pyslurm calls Slurm's functions by their present names: a call that is left out leaks or does nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "container" / "build-pyslurm"


def test_the_configuration_of_slurmctld_is_freed(tmp_path: Path) -> None:
    """It is freed by its old name; each read of a held or drained site loads one, of 14 kB."""
    for name in ("version.py", "deprecated.pyx", "__init__.py"):
        (tmp_path / "pyslurm").mkdir(exist_ok=True)
        (tmp_path / "pyslurm" / name).write_text("")
    adapt = SCRIPT.read_text().partition("\nadapt() {")[2].partition("\n}\n")[0]
    subprocess.run(["bash", "-euc", f"adapt() {{{adapt}\n}}; adapt {tmp_path} 26.5"], check=True)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "slurm.h").write_text("")
    caller = subprocess.run(
        ["gcc", "-E", "-P", "-I", tmp_path, "-include", tmp_path / "compat.h", "-"],
        input="slurm_free_ctl_conf(config);", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert caller.stdout.strip() == "slurm_free_conf(config);"
