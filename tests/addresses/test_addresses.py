"""The library of addresses that stay, over stand-ins for the driver and CUDA's runtime (drive.c)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from addresses_bench import HERE, Bench

OLDEST_LIBC = (2, 17)
"""That of the oldest systems on which PyTorch runs."""


def assert_passes(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", [12, 13])
def test_it_serves_a_program_that_is_linked_against_a_versioned_runtime(
    bench: Bench, preloaded: Path, version: int
) -> None:
    drive = bench.compile(f"drive{version}", "-O1", HERE / "drive.c", bench.runtime(version))
    assert_passes(bench.run(drive, LD_PRELOAD=str(preloaded)))


def test_its_checks_pass_under_the_sanitizers(bench: Bench, sanitized: Path) -> None:
    assert_passes(bench.run(sanitized))


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_agree_with_a_model(bench: Bench, sanitized: Path, seed: int) -> None:
    assert_passes(bench.run(sanitized, ["fuzz", str(seed), "1500"]))


def test_without_a_driver_the_runtime_serves_all(bench: Bench, sanitized: Path, tmp_path: Path) -> None:
    (tmp_path / "libcudart.so.13").symlink_to(bench.folder / "libcudart.so.13")
    assert_passes(bench.run(sanitized, ["without_a_driver"], LD_LIBRARY_PATH=str(tmp_path)))


def test_programs_without_a_gpu_start_as_before(bench: Bench, preloaded: Path) -> None:
    done = bench.run(Path(sys.executable), ["-S", "-c", "import ctypes; print(6)"], LD_PRELOAD=str(preloaded))
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


def test_it_needs_an_old_libc_and_nothing_else(preloaded: Path) -> None:
    dynamic = subprocess.run(["readelf", "-dV", str(preloaded)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) == ["libc.so.6"]
    versions = {tuple(map(int, one.split("."))) for one in re.findall(r"GLIBC_([\d.]+)", dynamic)}
    assert max(versions) <= OLDEST_LIBC
    assert "BIND_NOW" not in dynamic
