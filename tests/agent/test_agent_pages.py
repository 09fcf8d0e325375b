"""The shared page from the agent's side."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import msgspec
import pytest

from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.pages import MAX_STEP, Page
from cadenza.sidecar.agent.ipc.processes import is_stopped, job_of, start_ticks
from cadenza.sidecar.agent.telemetry.collector import Stretch, joined


def test_counters_become_telemetry() -> None:
    page = Page()
    words = memoryview(mmap.mmap(page.fd, wire.PAGE_BYTES)).cast("Q")
    assert words[wire.PAGE_MAGIC] == wire.MAGIC
    assert page.telemetry().iteration_s is None
    for milliseconds in [10] * 98 + [50, 500]:
        words[wire.PAGE_SUM_NS] += milliseconds * 1_000_000
        words[wire.PAGE_HISTOGRAM + wire.bucket(milliseconds * 1_000_000)] += 1
    words[wire.PAGE_STEP] = 100
    counters = page.telemetry()
    assert counters.step == 100
    assert counters.iteration_s == pytest.approx(0.0153)
    assert counters.iteration_p99_s == pytest.approx(0.05, rel=0.25)
    page.order(12, 101)
    assert (words[wire.PAGE_ORDER], words[wire.PAGE_STOP]) == (12, 101)


def test_a_jobs_nonsense_in_its_page_does_no_harm() -> None:
    page = Page()
    words = memoryview(mmap.mmap(page.fd, wire.PAGE_BYTES)).cast("Q")
    for index in range(len(words)):
        words[index] = 2**64 - 1
    assert page.step == MAX_STEP
    page.order(1, page.step + 1)
    assert page.telemetry().iteration_p99_s is None, "a record that is always being written"
    words[wire.PAGE_SEQUENCE] -= 1
    assert page.telemetry().iteration_p99_s is not None
    record = page.record()
    assert record is not None
    assert len(msgspec.json.encode(joined(5.0, None, [Stretch(record, record)] * 2))) < 1000
    page.close()
    page.close()


@pytest.mark.parametrize("nanoseconds", [0, 1, 3, 4, 7, 8, 1000, 10**6, 10**9, 10**12])
def test_a_bucket_holds_what_falls_into_it(nanoseconds: int) -> None:
    index = wire.bucket(nanoseconds)
    assert nanoseconds <= wire.bucket_upper_ns(index)
    assert index == 0 or nanoseconds > wire.bucket_upper_ns(index - 1)


def test_processes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_ticks(os.getpid()) is not None
    assert start_ticks(2**22 + 1) is None
    assert not is_stopped(os.getpid())
    assert job_of(2**22 + 1) is None


def test_the_cgroup_decides_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"cgroup": "0::/system.slice/n1_slurmstepd.scope/job_77/step_0/user/task_0\n", "environ": ""}
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[path.name])
    monkeypatch.setattr(Path, "read_bytes", lambda path: files[path.name].encode())
    files["environ"] = "A=1\0SLURM_JOB_ID=5\0"
    assert job_of(1) == 77
    files["cgroup"] = "4:memory:/slurm_n1/uid_1000/job_78/step_batch/task_0\n"
    assert job_of(1) == 78
    files["cgroup"] = "0::/system.slice/n1_slurmstepd.scope/sluid_s6BQ/step_0\n"
    assert job_of(1) == 5
    files["environ"] = "SLURM_JOB_ID=x\0"
    assert job_of(1) is None
