"""The plugin's files that do not use Slurm, compiled unchanged and called through ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "slurm_plugin" / "spank"
FILES = ("options.c", "config.c", "message.c", "agent.c", "leftover.c", "preload.c")


@pytest.fixture(scope="session")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    assert compiler, "these tests compile C: install gcc or another compiler that is called cc"
    path = tmp_path_factory.mktemp("spank") / "parts.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, *(str(SOURCES / name) for name in FILES), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def library(library_path: Path) -> ctypes.CDLL:
    parts = ctypes.CDLL(str(library_path))
    parts.parse_gpus.restype = parts.start_message.restype = parts.end_message.restype = ctypes.c_size_t
    parts.reason_of.restype = ctypes.c_void_p
    parts.handover_read.restype = parts.comment_batch_per_gpu.restype = parts.comment_late.restype = ctypes.c_bool
    parts.comment_graphs.restype = parts.comment_summary.restype = parts.preload_find.restype = ctypes.c_bool
    return parts
