"""Two unmodified scripts on a GPU that is too small for both: the agent takes them off it by the driver, in turns."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_rig import Agent, until
from registered_job import registered
from test_agent_turns import facts

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("plain_training.py")
SIMULATED = Path(__file__).resolve().parents[1] / "simulated"
PREPARE = """
import simulated_gpu, sys
print(simulated_gpu.driver_libraries())
simulated_gpu.create(simulated_gpu.Path(sys.argv[1]), 330 << 20)
"""
PATIENCE_S = 120.0
SWITCHES = 4


def losses(path: Path) -> list[tuple[float, str]]:
    """Return the moment and the loss of each step that a script has written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n") and not line.startswith("digest")]
    return [(float(moment), loss) for moment, loss in rows]


def switches(outs: list[Path]) -> int:
    """Return how often one job's step followed the other's."""
    steps = sorted((moment, out.name) for out in outs for moment, _ in losses(out))
    return sum(before[1] != after[1] for before, after in itertools.pairwise(steps))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler to build the simulated GPU")
def test_two_scripts_without_a_word_of_cadenza_take_turns_and_compute_the_same(
    new_agent: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs the extra `client`")
    pytest.importorskip("cuda.bindings", reason="needs the extra `driver`")
    # 1. torch finds the simulated GPU by itself, as any device that an extension brings.
    plugin = tmp_path / "simulated_gpu-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated_gpu\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[torch.backends]\nsimulated = simulated_gpu:load\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SIMULATED}")
    gpu = tmp_path / "gpu"
    command = [sys.executable, "-c", PREPARE, str(gpu)]
    bare = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    libraries = subprocess.check_output(command, env=bare, text=True).strip()
    monkeypatch.setenv("SIMULATED_GPUS", str(gpu))
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries)
    # 2. Two jobs of 300 MiB that do not attach take turns on 330 MiB.
    agent = facts(new_agent(driver_checkpoint="unattached"), slice_s=0.4)
    outs, end = [tmp_path / f"job{job}" for job in (1, 2)], tmp_path / "end"
    jobs = []
    for job, out in enumerate(outs, 1):
        script = [sys.executable, str(JOB), str(out), "1000000", str(end)]
        own = {**os.environ, "SLURM_JOB_ID": str(job)}
        jobs.append(subprocess.Popen(registered(agent.socket, job, [0], *script, granted=True), env=own))
    try:
        until(
            lambda: switches(outs) >= SWITCHES or any(job.poll() is not None for job in jobs),
            f"turns: {agent.log()}", PATIENCE_S,
        )  # fmt: skip
        end.touch()
        assert [job.wait(PATIENCE_S) for job in jobs] == [0, 0], agent.log()
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert agent.log().count("driver path: frozen") >= SWITCHES - 1
    # 3. Each computed what it computes alone, the longer one to the last bit of all that it had on the GPU.
    agent.close()
    longer, alone = max(outs, key=lambda out: len(losses(out))), tmp_path / "alone"
    subprocess.run([sys.executable, str(JOB), str(alone), str(len(losses(longer))), "/none"], check=True)
    expected = [loss for _, loss in losses(alone)]
    for out in outs:
        assert [loss for _, loss in losses(out)] == expected[: len(losses(out))]
    assert longer.read_text().splitlines()[-1] == alone.read_text().splitlines()[-1]
