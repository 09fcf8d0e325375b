"""Two jobs whose state does not fit on the GPU together take turns there: the real agent, client and engine."""

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

JOB = Path(__file__).with_name("gpu_job.py")
MAKER = Path(__file__).resolve().parents[1] / "simulated" / "simulated_gpu.py"
PATIENCE_S = 120.0
AWAY_S = 0.08
"""A boundary that takes longer was a turn of the other job."""


def boundaries(path: Path) -> list[tuple[float, float, str]]:
    """Return when each boundary began and ended, and the loss before it."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n")]
    assert [int(row[2]) for row in rows] == list(range(1, len(rows) + 1))
    return [(float(began), float(ended), loss) for began, ended, _, loss in rows]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler to build the simulated GPU")
def test_two_jobs_that_do_not_fit_together_take_turns_and_compute_the_same(
    new_agent: Callable[..., Agent], tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="needs the extra `client`")
    subprocess.run([sys.executable, str(MAKER), str(tmp_path / "gpu"), str(64 << 20)], check=True)
    environment = {**os.environ, "SIMULATED_GPUS": str(tmp_path / "gpu")}
    agent = facts(new_agent())
    outs = [tmp_path / f"job{job}" for job in (1, 2)]
    jobs = []
    for job, out in enumerate(outs, 1):
        own = {**environment, "CADENZA_SOCKET": str(agent.socket), "SLURM_JOB_ID": str(job)}
        jobs.append(subprocess.Popen(registered(agent.socket, job, [0], sys.executable, str(JOB), str(out)), env=own))
    try:
        for job, out in zip(jobs, outs, strict=True):
            until(
                lambda job=job, out=out: (
                    job.poll() is not None or sum(ended - began > AWAY_S for began, ended, _ in boundaries(out)) >= 2
                ),
                "two turns of the other",
                PATIENCE_S,
            )
        assert [job.poll() for job in jobs] == [None, None]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    # 1. They never trained at the same time.
    training = sorted((first[1], second[0]) for out in outs for first, second in itertools.pairwise(boundaries(out)))
    for (_, end), (start, _) in itertools.pairwise(training):
        assert start >= end - 1e-3, "two jobs trained at once"
    # 2. Both computed what the job computes alone.
    losses = [[loss for _, _, loss in boundaries(out)] for out in outs]
    steps = str(max(map(len, losses)))
    subprocess.run([sys.executable, str(JOB), str(tmp_path / "alone"), steps], env=environment, check=True)
    alone = [loss for _, _, loss in boundaries(tmp_path / "alone")]
    for one in losses:
        assert one == alone[: len(one)]
