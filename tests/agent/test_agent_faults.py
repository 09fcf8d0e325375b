"""Faults under the real agent: a job killed in the middle of its copy, and a wall clock that jumps."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from agent_rig import Agent, until
from registered_job import registered
from test_agent_turns import facts
from test_agent_with_client import JOB, boundaries, waits

pytestmark = pytest.mark.slow

COPYING = """
import sys, threading
from pathlib import Path
import torch
from cadenza.sidecar import client
from cadenza.sidecar.client.offload import engine
copies, original = [], engine.CopyStream.copy

def copy(lane, raws, batch, place, *, out):
    original(lane, raws, batch, place, out=out)
    copies.append(batch)
    if len(copies) == 2:  # the first storage has been released, the last not been copied
        Path(sys.argv[1]).touch()
        threading.Event().wait()

engine.CopyStream.copy = copy
session = client.attach(tensors=[torch.ones(1 << 20) for _ in range(3)])
while True:
    threading.Event().wait(0.005)
    session.boundary()
"""

JUMPS = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
  int failed = (int)syscall(SYS_clock_gettime, clock, at);
  if (clock == CLOCK_REALTIME && !access(FOLDER "/back", F_OK)) at->tv_sec -= 86400;
  if (clock == CLOCK_REALTIME && !access(FOLDER "/forth", F_OK)) at->tv_sec += 2 * 86400;
  return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""
"""A wall clock that is set a day back and two days forth by making a file; the monotonic clock is left alone."""


class Jobs:
    """Real clients in processes of their own, as jobs 1, 2, … on one GPU."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, agent: Agent, script: str, argument: Path) -> subprocess.Popen[bytes]:
        job = len(self.processes) + 1
        own = {"CADENZA_SOCKET": str(agent.socket), "SLURM_JOB_ID": str(job), "OMP_NUM_THREADS": "1"}
        command = registered(agent.socket, job, [0], sys.executable, "-c", script, str(argument))
        self.processes.append(subprocess.Popen(command, env={**os.environ, **own}))
        return self.processes[-1]


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_job_killed_in_mid_copy_hurts_nobody_else(
    new_agent: Callable[..., Agent], jobs: Jobs, tmp_path: Path
) -> None:
    agent = facts(new_agent())
    copying, out = tmp_path / "copying", tmp_path / "job2"
    first = jobs.start(agent, COPYING, copying)
    until(lambda: b'"job":1' in (agent.state / "leases.json").read_bytes(), "a lease of the first", 60)
    jobs.start(agent, JOB, out)
    until(copying.exists, "a copy of the first", 60)
    assert boundaries(out) == []  # it waits for the lease
    first.send_signal(signal.SIGKILL)
    until(lambda: len(boundaries(out)) > 3, "steps of the second")
    assert set(agent.leases()) == {2}
    assert [step for _, _, step in boundaries(out)][:3] == [1, 2, 3]


def settable(folder: Path) -> str:
    """Return the path of a library whose wall clock can be set, compiled here and seen to work."""
    source, library = folder / "jumps.c", folder / "jumps.so"
    source.write_text(JUMPS)
    subprocess.run(["cc", "-shared", "-fPIC", f'-DFOLDER="{folder}"', "-o", str(library), str(source)], check=True)
    script = "import sys, time; before = time.time(); open(sys.argv[1], 'w'); print(time.time() - before)"
    command = [sys.executable, "-c", script, str(folder / "back")]
    done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(library)}, check=True, capture_output=True)
    assert float(done.stdout) < -86000
    (folder / "back").unlink()
    return str(library)


def together(stretches: Sequence[tuple[float, float]]) -> bool:
    """Return True if two jobs trained at once."""
    return any(start < end - 1e-3 for (_, end), (start, _) in itertools.pairwise(sorted(stretches)))


def turns_go_on(outs: Sequence[Path]) -> None:
    """Wait until each job has made way once more."""
    before = [waits(out) for out in outs]
    for out, earlier in zip(outs, before, strict=True):
        until(lambda out=out, earlier=earlier: waits(out) > earlier, "a turn of the other", 20)


def test_a_wall_clock_that_jumps_by_days_changes_nothing(
    new_agent: Callable[..., Agent], jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's and its jobs' clock is set a day back, then two forth; after that the agent dies and comes again."""
    monkeypatch.setenv("LD_PRELOAD", settable(tmp_path))
    agent = facts(new_agent())
    outs = [tmp_path / f"job{job}" for job in (1, 2)]
    for out in outs:
        jobs.start(agent, JOB, out)
    turns_go_on(outs)
    (tmp_path / "back").touch()
    turns_go_on(outs)
    (tmp_path / "forth").touch()
    turns_go_on(outs)
    agent.down(signal.SIGKILL)
    agent.up()
    turns_go_on(outs)
    rows = [boundaries(out) for out in outs]
    assert not together([(one[1], two[0]) for row in rows for one, two in itertools.pairwise(row)])
    assert all([step for _, _, step in row] == list(range(1, len(row) + 1)) for row in rows)
