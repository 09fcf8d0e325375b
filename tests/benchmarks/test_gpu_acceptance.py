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
NEEDS_A_GPU = {
    "C a CUDA graph and a pool refuse by name",
    "C expandable segments leave the GPU",
    "C DDP and FSDP with one rank",
    "C NCCL with two ranks",
    "C torch.compile's CUDA graphs refuse by name",
    "C a graph behind gc.freeze() refuses",
    "C cudaMallocAsync refuses by name",
    "F mappings of managed memory",
    "F the driver's trial of doctor --gpu",
    "F NCCL's watchdog keeps a process from freezing",
}

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
    assert (code, len(rows)) == (0, 40)
    assert rows["B the GPU is free after a yield"]["figures"]["held_MiB"] > 12
    assert rows["H interrupts in the copy"]["figures"]["interrupts"] == 5


def test_a_broken_engine_fails(tmp_path: Path) -> None:
    sys.path.append(str(ROOT / "tests" / "simulated"))
    import mutants  # noqa: PLC0415

    mutants.change(mutants.copied(tmp_path), "small storages do not come back")
    code, rows = accepted(tmp_path, "--only", "C", "--rows", "bit-identical", PYTHONPATH=str(tmp_path))
    (row,) = rows.values()
    assert (code, row["outcome"]) == (1, "FAILED")
    assert "differ" in row["why"]


def test_a_machine_without_a_gpu_is_no_failure_and_wrong_blocks_are_refused() -> None:
    pytest.importorskip("torch", reason="needs the extra `client`")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    codes = [
        subprocess.run([sys.executable, str(COMMAND), "--only", letters], env=environment, check=False).returncode
        for letters in ("A", "A,X")
    ]
    assert codes == [3, 2]


def test_a_machine_with_torch_alone_runs_all_but_the_agent(tmp_path: Path) -> None:
    for name in ("msgspec", "zmq", "psutil"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    code, rows = accepted(tmp_path, "--only", "E,G", "--rows", "the", PYTHONPATH=str(tmp_path))
    assert code == 0
    assert {row["outcome"] for row in rows.values()} == {"not run"}
    assert "no msgspec here" in rows["E two processes alternate on one GPU"]["why"]
