"""The adapted pyslurm calls Slurm's functions by their present names, and reads requests that have a type."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "container" / "build-pyslurm"


def adapt(source: Path, job: str = "") -> None:
    """Adapt a source of pyslurm of which the files that change are there, ``job`` being core/job/job.pyx."""
    (source / "pyslurm" / "core" / "job").mkdir(parents=True)
    for name, text in {"version.py": "", "deprecated.pyx": "", "__init__.py": "", "core/job/job.pyx": job}.items():
        (source / "pyslurm" / name).write_text(text)
    function = SCRIPT.read_text().partition("\nadapt() {")[2].partition("\n}\n")[0]
    subprocess.run(["bash", "-euc", f"adapt() {{{function}\n}}; adapt {source} 26.5"], check=True)


def test_the_configuration_of_slurmctld_is_freed(tmp_path: Path) -> None:
    """It is freed by its old name; each read of a held or drained site loads one, of 14 kB."""
    adapt(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "slurm.h").write_text("")
    caller = subprocess.run(
        ["gcc", "-E", "-P", "-I", tmp_path, "-include", tmp_path / "compat.h", "-"],
        input="slurm_free_ctl_conf(config);", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert caller.stdout.strip() == "slurm_free_conf(config);"


def test_the_type_of_a_request_for_the_whole_job_is_read(tmp_path: Path) -> None:
    """Of --gpus=a100:2, which Slurm keeps as gres/gpu:a100:2, pyslurm reads nothing: it looks for an equals sign."""
    lines = [f"return TrackableResources.from_cstr(self.ptr.{name})" for name in ("tres_per_job", "tres_per_task")]
    adapt(tmp_path, "\n".join(lines))
    changed = (tmp_path / "pyslurm" / "core" / "job" / "job.pyx").read_text().splitlines()
    assert changed == ["return cstr.to_gres_dict(self.ptr.tres_per_job)", lines[1]]


LOAD = """
    @staticmethod
    def load(job_id):
        verify_rpc(slurm_load_job(&info, job_id, slurm.SHOW_DETAIL))
        if not slurm.IS_JOB_PENDING(wrap.ptr):
    @staticmethod
    cdef Job from_ptr(slurm_job_info_t *in_ptr):
        if not slurm.IS_JOB_PENDING(wrap.ptr):
"""
"""The lines of ``Job.load`` that ask slurmctld, as pyslurm 25.11.2 has them, and one elsewhere."""


def test_a_look_at_a_job_asks_for_that_job_only(tmp_path: Path) -> None:
    """Not for the federation first and the job's steps afterward, which made it three requests."""
    adapt(tmp_path, LOAD)
    changed = (tmp_path / "pyslurm" / "core" / "job" / "job.pyx").read_text()
    local = LOAD.replace("slurm.SHOW_DETAIL", "slurm.SHOW_DETAIL | slurm.SHOW_LOCAL")
    assert changed == local.replace("if not slurm.IS_JOB_PENDING(wrap.ptr):", "if False:", 1)
