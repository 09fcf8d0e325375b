"""Two jobs whose state does not fit on the GPU together take turns there: the real agent, client and engine."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_rig import Agent, until
from registered_job import registered
from test_agent_turns import facts

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("gpu_job.py")
MAKER = Path(__file__).resolve().parents[1] / "simulated" / "simulated_gpu.py"
PATIENCE_S = 120.0
STATE_BYTES = 31 << 20
AWAY_S = 0.08
"""A boundary that takes longer was a turn of the other job."""


def boundaries(path: Path) -> list[tuple[float, float, str]]:
    """Return when each boundary began and ended, and the loss before it."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n")]
    assert [int(row[2]) for row in rows] == list(range(1, len(rows) + 1))
    return [(float(began), float(ended), loss) for began, ended, _, loss in rows]


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start jobs on a GPU of 64 MiB, each with the path of its boundaries; they end with the test."""
    pytest.importorskip("torch", reason="needs the extra `client`")
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler to build the simulated GPU")
    subprocess.run([sys.executable, str(MAKER), str(tmp_path / "gpu"), str(64 << 20)], check=True)
    jobs: list[subprocess.Popen[bytes]] = []

    def start(
        agent: Agent, job: int, out: Path, *options: str, gpus: tuple[int, ...] = (0,), **own: str
    ) -> subprocess.Popen[bytes]:
        where = {"SIMULATED_GPUS": str(tmp_path / "gpu"), "CADENZA_SOCKET": str(agent.socket), "SLURM_JOB_ID": str(job)}
        command = registered(agent.socket, job, gpus, sys.executable, str(JOB), str(out), *options)
        jobs.append(subprocess.Popen(command, env={**os.environ, **where, **own}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.wait()


def test_two_jobs_that_do_not_fit_together_take_turns_and_compute_the_same(
    new_agent: Callable[..., Agent], new_job: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    agent = facts(new_agent())
    outs = [tmp_path / f"job{job}" for job in (1, 2)]
    jobs = [new_job(agent, job, out) for job, out in enumerate(outs, 1)]
    for job, out in zip(jobs, outs, strict=True):
        until(
            lambda job=job, out=out: (
                job.poll() is not None or sum(ended - began > AWAY_S for began, ended, _ in boundaries(out)) >= 2
            ),
            "two turns of the other",
            PATIENCE_S,
        )
    assert [job.poll() for job in jobs] == [None, None]
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
    environment = {**os.environ, "SIMULATED_GPUS": str(tmp_path / "gpu")}
    subprocess.run([sys.executable, str(JOB), str(tmp_path / "alone"), "--steps", steps], env=environment, check=True)
    alone = [loss for _, _, loss in boundaries(tmp_path / "alone")]
    for one in losses:
        assert one == alone[: len(one)]


def test_a_job_that_does_not_fit_next_to_what_the_other_keeps_waits_and_the_reason_names_its_process(
    new_agent: Callable[..., Agent],
    new_job: Callable[..., subprocess.Popen[bytes]],
    libraries: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent knows what each needs and keeps from the client's reports and from NVML."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    monkeypatch.setenv("SIMULATED_GPUS", str(tmp_path / "gpu"))
    agent = facts(new_agent())
    new_job(agent, 1, tmp_path / "large")
    until(lambda: boundaries(tmp_path / "large"), f"a first step: {agent.log()}", PATIENCE_S)
    keeper = new_job(agent, 2, tmp_path / "keeper", "--hidden", "256", "--kept", "36")
    until(lambda: "stop withdrawn JOBID=2" in agent.log(), f"a refusal: {agent.log()}", PATIENCE_S)
    text = agent.log().partition("stop withdrawn JOBID=2 refused: ")[2].partition("\n")[0]
    full = (
        r"it would keep too much of its GPUs for job 1: GPU 0 has (\d+) MB free of the (\d+) MB that the job needs, "
        r"beside (\d+) MB that stay of the job that makes way: pid (\d+) of job 1 has (\d+) MB"
    )
    found = re.fullmatch(full, text)
    assert found, text
    free, needed, kept, _, _ = map(int, found.groups())
    assert free < needed
    assert 30 <= needed < 40
    assert 37 <= kept < 44
    assert "yielded JOBID=2" not in agent.log(), "nothing has moved"
    assert keeper.poll() is None
    steps = len(boundaries(tmp_path / "keeper"))
    until(lambda: len(boundaries(tmp_path / "keeper")) > steps + 3, "the other job goes on", PATIENCE_S)
    assert agent.leases()[1]["state"] == "yielded"
    assert agent.log().count("stop JOBID=2") == 1


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_under_ddp_and_fsdp_take_turns_whatever_their_buckets_and_nccls_buffers_keep(
    new_agent: Callable[..., Agent],
    new_job: Callable[..., subprocess.Popen[bytes]],
    libraries: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world: int,
) -> None:
    """Buckets of 10 MiB, FSDP2's shards and 40 MiB beside torch, where a process that was not measured may keep 2."""
    monkeypatch.syspath_prepend(MAKER.parent)
    simulated_gpu = importlib.import_module("simulated_gpu")
    files, numbers = [tmp_path / f"gpu-{number}" for number in range(world)], range(world)
    for file in files:
        # FSDP2 works on five streams, and each has a segment of 20 MiB.
        simulated_gpu.create(file, 256 << 20, context_bytes=1 << 20)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    monkeypatch.setenv("SIMULATED_GPUS", ":".join(map(str, files)))
    agent = new_agent()
    agent.program = [str(Path(__file__).with_name("scaled_agent.py"))]
    facts(agent)
    wraps, ranks = {1: "ddp", 2: "fsdp"}, []
    for job, wrap in wraps.items():
        for number in numbers:
            own = {
                "SLURM_PROCID": str(number),
                "SLURM_STEP_NUM_TASKS": str(world),
                "SIMULATED_GPUS": str(files[number]),
            }
            options = ["--wrap", wrap, "--meeting", str(tmp_path / wrap), "--nccl", "40"]
            ranks.append(new_job(agent, job, tmp_path / f"{wrap}{number}", *options, gpus=(*numbers,), **own))
    outs = {wrap: [tmp_path / f"{wrap}{number}" for number in numbers] for wrap in wraps.values()}
    for out in itertools.chain(*outs.values()):
        until(
            lambda out=out: sum(ended - began > AWAY_S for began, ended, _ in boundaries(out)) >= 4 // world,
            f"turns of the other: {agent.log()}",
            PATIENCE_S,
        )
    assert all(rank.poll() is None for rank in ranks)
    assert "stop failed" not in agent.log()
    assert "stop withdrawn" not in agent.log()
    lefts = agent.leases()[1]["left_bytes"]
    assert len(lefts) == world
    assert min(lefts) >= (1 + 40 + 10) << 20, "what DDP and NCCL keep is on the lease"


def test_a_rank_without_room_gives_the_whole_job_s_gpus_to_the_next_one(
    new_agent: Callable[..., Agent],
    new_job: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without NVML the agent hears of it from the rank; the other rank has its state back, and moves out again."""
    monkeypatch.syspath_prepend(MAKER.parent)
    simulated_gpu = importlib.import_module("simulated_gpu")
    agent, outs, ranks = facts(new_agent()), [tmp_path / f"rank{number}" for number in (0, 1)], []
    gpus = [simulated_gpu.open_file(tmp_path / "gpu"), simulated_gpu.create(tmp_path / "gpu1", context_bytes=1 << 20)]
    for number, (out, file) in enumerate(zip(outs, ("gpu", "gpu1"), strict=True)):
        own = {"SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SIMULATED_GPUS": str(tmp_path / file)}
        ranks.append(new_job(agent, 1, out, "--retries", "0", gpus=(0, 1), **own))
    other = agent.rank(2, "--gpus", "[0]")
    until(lambda: all(map(boundaries, outs)), f"first steps: {agent.log()}", PATIENCE_S)
    until(lambda: agent.leases()[1]["state"] == "yielded", "a turn of the other job", PATIENCE_S)
    with simulated_gpu.occupied(gpus[1], gpus[1].capacity - gpus[1].context_bytes):
        until(lambda: "rank 1 waits for room on its GPU" in agent.log(), f"a refusal: {agent.log()}", PATIENCE_S)
        steps, turns = list(map(boundaries, outs)), len(other.said("run"))
        until(lambda: gpus[0].bytes_of[ranks[0].pid] < STATE_BYTES // 4, "the state of rank 0 to leave again")
        until(lambda: len(other.said("run")) > turns, "one more turn of the other job")
        assert list(map(boundaries, outs)) == steps
    until(lambda: all(len(boundaries(out)) > len(rows) for out, rows in zip(outs, steps, strict=True)), "further steps")
    losses = [[loss for _, _, loss in boundaries(out)] for out in outs]
    assert all(one == another for one, another in zip(*losses, strict=False)), "both ranks compute the same"


def test_a_job_that_is_out_when_its_gpu_fails_has_a_checkpoint_of_its_last_step(
    new_agent: Callable[..., Agent],
    new_job: Callable[..., subprocess.Popen[bytes]],
    libraries: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    monkeypatch.setenv("SIMULATED_GPUS", str(tmp_path / "gpu"))
    monkeypatch.syspath_prepend(MAKER.parent)
    gpu = importlib.import_module("simulated_gpu").open_file(tmp_path / "gpu")
    agent, kept = facts(new_agent(), slice_s=3.0), tmp_path / "checkpoints"
    new_job(agent, 1, tmp_path / "out", "--checkpoints", str(kept))
    until(lambda: boundaries(tmp_path / "out"), f"a first step: {agent.log()}", PATIENCE_S)
    holder = new_job(agent, 2, tmp_path / "holder")
    until(lambda: boundaries(tmp_path / "holder"), f"the other's first step: {agent.log()}", PATIENCE_S)
    gpu.lost = 1  # within the holder's turn
    holder.wait(PATIENCE_S)
    until(lambda: "checkpoint JOBID=1" in agent.log(), f"a checkpoint: {agent.log()}", PATIENCE_S)
    (found,) = kept.glob("step-*")
    assert int(found.name.partition("-")[2]) == len(boundaries(tmp_path / "out")) + 1
