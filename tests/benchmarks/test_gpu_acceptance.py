"""The command for the first GPU runs on the simulated one, and sees an engine that is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "benchmarks" / "gpu_acceptance.py"
NEEDS_A_GPU = {"mappings of managed memory", "NCCL with two ranks", "a CUDA graph and a pool refuse by name"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler to build the simulated GPU"),
]


def accepted(tmp_path: Path, *options: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the command; return its exit status and its rows by name."""
    pytest.importorskip("torch", reason="needs the extra `client`")
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(COMMAND), "--simulated", "--json", str(out), *options],
        env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert result["passed"] == (done.returncode == 0), done.stdout
    return done.returncode, {row["name"]: row for row in result["rows"]}


def test_all_that_needs_no_gpu_passes_on_the_simulated_one(tmp_path: Path) -> None:
    code, rows = accepted(tmp_path)
    assert {name for name, row in rows.items() if row["outcome"] == "FAILED"} == set(), rows
    assert {name: row["why"] for name, row in rows.items() if row["outcome"] == "not run"}.keys() == NEEDS_A_GPU
    assert (code, len(rows)) == (0, 21)
    assert rows["the GPU is free after a yield"]["figures"]["held_MiB"] > 12
    assert rows["interrupts in the copy"]["figures"]["interrupts"] == 5


def test_a_broken_engine_fails(tmp_path: Path) -> None:
    sys.path.append(str(ROOT / "tests" / "simulated"))
    import mutants  # noqa: PLC0415

    mutants.change(mutants.copied(tmp_path), "small storages do not come back")
    code, rows = accepted(tmp_path, "--only", "moves", "--rows", "bit-identical", PYTHONPATH=str(tmp_path))
    (row,) = rows.values()
    assert (code, row["outcome"]) == (1, "FAILED")
    assert "differ" in row["why"]
