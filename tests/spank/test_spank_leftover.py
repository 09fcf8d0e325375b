"""Processes left by a batch script end before slurmstepd looks for them: real processes in real control groups."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOUNT = Path("/sys/fs/cgroup")
STEPD = """
import ctypes, json, pathlib, subprocess, sys, time
library, own, step, other, victims = sys.argv[1:6]
ctypes.CDLL(None).prctl(15, b"slurmstepd", 0, 0, 0)
pathlib.Path(own, "cgroup.procs").write_text("0")
def child(group, code):
    enter = f"import pathlib, signal, time; pathlib.Path({group!r}, 'cgroup.procs').write_text('0');"
    made = subprocess.Popen([sys.executable, "-c", enter + code + "print(flush=True); time.sleep(60)"],
                            stdout=subprocess.PIPE)
    made.stdout.readline()
    return made
left = [child(step, "signal.signal(15, signal.SIG_IGN);") for _ in range(int(victims))]
bystander = child(other, "")
ctypes.CDLL(library).leftover_end()
listed = pathlib.Path(step, "cgroup.procs").read_text().split()
print(json.dumps({"listed": listed, "ended": [one.wait(5) for one in left], "bystander": bystander.poll()}))
bystander.kill()
bystander.wait()
"""


def writable(controller: str) -> bool:
    return os.geteuid() == 0 and os.access(MOUNT / controller / "cgroup.procs", os.W_OK)


pytestmark = pytest.mark.skipif(
    not (writable("freezer") and writable("devices")), reason="control groups of version 1 need root and their mounts"
)


@pytest.fixture(params=["freezer", "devices"])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path, Path]]:
    """The groups of slurmstepd, of the script's task, and of another step, as Slurm makes them under a controller."""
    top = MOUNT / request.param / f"leftover_{os.getpid()}"
    job = top / "job_5"
    task, other = job / "step_batch" / "task_0", job / "step_0"
    own = job if request.param == "freezer" else job / "step_batch"
    for folder in (task, other):
        folder.mkdir(parents=True)
    yield own, task if request.param == "devices" else job / "step_batch", other
    deadline = time.monotonic() + 5
    for folder in (task, job / "step_batch", other, job, top):
        while True:
            try:
                folder.rmdir()
                break
            except OSError:
                assert time.monotonic() < deadline, f"{folder} is still in use"


def run(library: Path, groups: tuple[Path, Path, Path], victims: int) -> dict[str, Any]:
    words = [sys.executable, "-c", STEPD, str(library), *map(str, groups), str(victims)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(done.stdout))


def test_what_is_left_of_the_script_is_gone_on_return_and_other_steps_are_not(
    library_path: Path, groups: tuple[Path, Path, Path]
) -> None:
    found = run(library_path, groups, 3)
    assert found == {"listed": [], "ended": [-9, -9, -9], "bystander": None}


def test_nothing_left_is_no_error(library_path: Path, groups: tuple[Path, Path, Path]) -> None:
    assert run(library_path, groups, 0) == {"listed": [], "ended": [], "bystander": None}


def test_outside_of_any_step_nothing_happens(library: ctypes.CDLL) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        library.leftover_end()
        assert child.poll() is None
        child.kill()
