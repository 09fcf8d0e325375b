"""The trial of ``cadenza doctor --gpu`` moves state with the engine and torch on the simulated GPU, seen by NVML."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cadenza.sidecar.agent.driver import engine_trial
from cadenza.sidecar.agent.driver.trial_record import EngineTrial

pytestmark = pytest.mark.slow

SIMULATED = Path(__file__).resolve().parents[1] / "simulated"
MAKER = SIMULATED / "simulated_gpu.py"
TRIAL = """
import msgspec, sys
from cadenza.sidecar.agent.driver import engine_trial
print(msgspec.json.encode(engine_trial.run(sys.argv[1], "GPU-0")).decode())
"""
STATE_BYTES = 8 << 20
"""An eighth of the GPU's memory."""


@pytest.fixture(scope="module")
def environment(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose torch finds a simulated GPU by itself, and whose NVML sees it."""
    pytest.importorskip("torch", reason="needs the extra `client`")
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler to build the simulated GPU")
    folder = tmp_path_factory.mktemp("gpu")
    plugin = folder / "simulated_gpu-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated_gpu\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[torch.backends]\nsimulated = simulated_gpu:load\n")
    subprocess.run([sys.executable, str(MAKER), str(folder / "gpu"), str(64 << 20)], check=True)
    own = {"SIMULATED_GPUS": str(folder / "gpu"), "LD_LIBRARY_PATH": str(libraries)}
    return {**os.environ, **own, "PYTHONPATH": f"{folder}:{SIMULATED}"}


def tried(environment: dict[str, str], python: str = sys.executable, package: str = "") -> dict[str, Any]:
    """Return the record of a trial with a Python's torch; ``package`` is the folder of another Cadenza."""
    found: dict[str, Any] = json.loads(
        subprocess.check_output(
            [sys.executable, "-c", TRIAL, python],
            env={**environment, "PYTHONPATH": f"{package}:{environment['PYTHONPATH']}"}, text=True,
        )
    )  # fmt: skip
    return found


def test_state_goes_out_and_comes_back_next_to_another_process(environment: dict[str, str]) -> None:
    record = tried(environment)
    assert (record["failed"], record["not_run"], record["bytes"]) == ("", "", STATE_BYTES)
    assert (record["left_bytes"], record["kept_bytes"], record["pinned"]) == (0, 0, True)
    assert record["torch"]
    assert min(record["out_s"], record["back_s"]) > 0


@pytest.mark.parametrize(
    ("mutant", "failed"),
    [
        ("small storages do not come back", "the content differs"),
        ("the allocator keeps the memory", "MB stay on the GPU after a yield"),
    ],
)
def test_an_engine_that_is_broken_fails_the_trial(
    environment: dict[str, str], tmp_path: Path, mutant: str, failed: str
) -> None:
    sys.path.append(str(SIMULATED))
    import mutants  # noqa: PLC0415

    mutants.change(mutants.copied(tmp_path), mutant)
    record = tried(environment, package=str(tmp_path))
    assert (record["not_run"], record["bytes"]) == ("", 0)
    assert failed in record["failed"]


def test_a_python_without_torch_runs_no_trial(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    assert engine_trial.run(str(bare), "GPU-0") == EngineTrial(not_run=f"{bare}: it has no torch")
    missing = str(tmp_path / "missing")
    assert engine_trial.run(missing, "GPU-0") == EngineTrial(not_run=f"{missing}: No such file or directory")
