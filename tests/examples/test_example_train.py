"""The training example: the same bits again, attached or not, paced or not."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"


def train(out: Path, *words: str) -> dict[str, Any]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CADENZA_"))}
    done = subprocess.run(
        [sys.executable, TRAIN, "--out", out, "--model", "transformer", "--iterations", "120", *words],
        env={**outside, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(out.read_text()))


def test_attaching_outside_slurm_changes_no_bit_and_the_pace_holds(tmp_path: Path) -> None:
    attached = train(tmp_path / "attached.json")
    alone = train(tmp_path / "alone.json", "--no-attach", "--iteration-s", "0.01")
    for name in ("losses_sha256", "parameters_sha256", "loss"):
        assert attached[name] == alone[name]
    assert attached["started_s"] < attached["iteration_1_s"] < attached["iteration_100_s"] < attached["ended_s"]
    assert alone["iteration_100_s"] - alone["iteration_1_s"] >= 98 * 0.01
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_moved_job_keeps_the_times_of_its_iterations() -> None:
    log_of = runpy.run_path(str(TRAIN))["Log"]
    before, after = log_of({"started_s": 1.0}), log_of({"started_s": 2.0})
    for number in range(1, 102):
        before.step(number, 0.5)
    after.load_state_dict(before.state_dict())
    assert after.times["iteration_100_s"] == before.times["iteration_100_s"]
    assert after.times == {**before.times, "started_s": 2.0}
    assert after.digest() == before.digest()
