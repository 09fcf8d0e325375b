"""The files of GPUs' jobs for dcgm-exporter and jobstats say at each moment what the leases say; none is empty."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from agent_rig import Agent, until
from hypothesis import given
from hypothesis import strategies as st

from cadenza.sidecar.agent.errors import LeaseConflictError
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable
from cadenza.sidecar.agent.telemetry.gpu_job_files import GpuJobFiles
from cadenza.sidecar.agent.telemetry.gpu_watch import NO_LOOK
from cadenza.sidecar.agent.telemetry.gpus import NvmlDevice

LOOK = NO_LOOK._replace(names={0: ("1", "GPU-aa"), 1: ("0",)})
"""NVML counts the two GPUs the other way round, and has a UUID for one of them only."""


def lease(job: int, *gpus: int) -> Lease:
    return Lease(job, 0, 1000 + job, gpus, 0.0)


def found(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_turn_changes_the_job_of_its_gpus(tmp_path: Path) -> None:
    table, files = LeaseTable(), GpuJobFiles(tmp_path)
    one, two = table.register(lease(7, 0, 1), 0.0), table.register(lease(8, 0), 0.0)
    table.grant(one, 1.0)
    files.write(table, LOOK)
    sevens = {"gpu-jobs/0": "7\n", "gpu-jobs/1": "7\n", "gpustat/0": "7 1007\n", "gpustat/1": "7 1007\n"}
    assert found(tmp_path) == {**sevens, "gpustat/GPU-aa": "7 1007\n"}
    table.stop(one, 2.0)
    files.write(table, LOOK)
    assert found(tmp_path)["gpu-jobs/0"] == "7\n", "it has the GPU until its state has left"
    table.release(one, 3.0)
    table.grant(two, 4.0)
    files.write(table, LOOK)
    assert found(tmp_path) == {"gpu-jobs/1": "8\n", "gpustat/1": "8 1008\n", "gpustat/GPU-aa": "8 1008\n"}
    table.drop(two, 5.0)
    files.write(table, LOOK)
    assert found(tmp_path) == {}


def test_a_pack_has_a_line_a_job_for_dcgm_and_the_first_job_for_jobstats(tmp_path: Path) -> None:
    table = LeaseTable()
    jobs = [table.register(lease(number, 1), 0.0) for number in (9, 8)]
    table.pack({one.key: 1 for one in jobs})
    for at, one in enumerate(jobs):
        table.grant(one, 1.0 + at)
    GpuJobFiles(tmp_path).write(table, LOOK)
    assert found(tmp_path) == {"gpu-jobs/0": "9\n8\n", "gpustat/0": "9 1009\n"}


def test_a_new_agent_removes_what_is_no_longer_true(tmp_path: Path) -> None:
    table, files = LeaseTable(), GpuJobFiles(tmp_path)
    table.grant(table.register(lease(7, 0), 0.0), 1.0)
    files.write(table, LOOK)
    (tmp_path / "gpu-jobs" / ".new-3").write_text("")
    (tmp_path / "gpu-jobs" / "4").mkdir()
    GpuJobFiles(tmp_path).write(LeaseTable(), NO_LOOK)
    assert found(tmp_path) == {}


def test_divided_gpus_have_no_files_because_slurm_numbers_their_instances(tmp_path: Path) -> None:
    table = LeaseTable()
    table.grant(table.register(lease(7, 0), 0.0), 1.0)
    GpuJobFiles(tmp_path).write(table, LOOK._replace(divided=(0,)))
    assert found(tmp_path) == {}


def test_a_file_that_cannot_be_written_is_gone_and_the_agent_goes_on(tmp_path: Path) -> None:
    table, files = LeaseTable(), GpuJobFiles(tmp_path)
    one = table.register(lease(7, 0), 0.0)
    table.grant(one, 1.0)
    files.write(table, LOOK)
    (tmp_path / "gpu-jobs" / ".new-1").mkdir()
    table.drop(one, 2.0)
    table.grant(table.register(lease(8, 0), 2.0), 3.0)
    files.write(table, LOOK)
    assert found(tmp_path) == {"gpustat/1": "8 1008\n", "gpustat/GPU-aa": "8 1008\n"}


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["register", "grant", "stop", "keep", "release", "drop"])))
)
def test_in_any_history_the_files_name_the_jobs_that_have_the_gpus(history: list[tuple[int, str]]) -> None:
    table, jobs = LeaseTable(), {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = GpuJobFiles(folder)
        for at, (job, event) in enumerate(history):
            try:
                if event == "register":
                    if job not in jobs or table.get(jobs[job].key) is None:
                        jobs[job] = table.register(lease(job, *{job % 2, job % 3 % 2}), float(at))
                elif job in jobs and table.get(jobs[job].key):
                    getattr(table, event)(jobs[job], float(at))
            except LeaseConflictError:  # the state does not allow it, and nothing has changed
                continue
            files.write(table, LOOK)
            expected = {
                f"gpu-jobs/{LOOK.names[gpu][0]}": f"{one.job}\n" for one in table if one.occupying for gpu in one.gpus
            }
            assert {path: text for path, text in found(folder).items() if path.startswith("gpu-jobs")} == expected


def test_a_reader_never_finds_an_empty_file(tmp_path: Path) -> None:
    table, files = LeaseTable(), GpuJobFiles(tmp_path)
    seen, over = set(), threading.Event()

    def read() -> None:
        while not over.is_set():
            for path in (tmp_path / "gpu-jobs" / "1", tmp_path / "gpustat" / "GPU-aa"):
                try:
                    seen.add(path.read_text())
                except FileNotFoundError:
                    continue

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 150):
        one = table.register(lease(number % 9, 0), 0.0)
        table.grant(one, 1.0)
        files.write(table, LOOK)
        table.drop(one, 2.0)
        if number % 2:
            files.write(table, LOOK)
    over.set()
    reader.join()
    assert seen <= {text for job in range(9) for text in (f"{job}\n", f"{job} {1000 + job}\n")}


def test_nvml_tells_the_names_that_exporters_have() -> None:
    class Error(Exception):
        value = 3

    class Nvml:
        NVMLError = Error
        nvmlDeviceGetHandleByIndex = nvmlDeviceGetMinorNumber = staticmethod(lambda position: position + 4)  # noqa: N815
        uuid = "GPU-0a-1b"

        def nvmlDeviceGetUUID(self, _handle: int) -> str:  # noqa: N802
            return self.uuid

    nvml = Nvml()
    assert NvmlDevice(nvml, 2).names == ("2", "GPU-0a-1b")
    nvml.uuid = "../etc"
    assert NvmlDevice(nvml, 2).names == ("2",)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_an_agent_whose_metrics_cannot_be_had_serves_its_jobs(new_agent: Callable[..., Agent]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        agent = new_agent(metrics=f"127.0.0.1:{taken.getsockname()[1]}").up()
        until(lambda: "no metrics: agent.metrics = '127.0.0.1:" in agent.log(), "a line in the log")
    holder = agent.talk()
    holder.until_granted(holder.start(1, [0]))


def test_an_agent_keeps_its_files_and_tells_prometheus_of_its_leases(
    new_agent: Callable[..., Agent], port: int
) -> None:
    agent = new_agent(metrics=f"127.0.0.1:{port}").up()
    holder, waiter = agent.talk(), agent.talk()
    holder.until_granted(holder.start(1, [0]))
    jobs = agent.directory / "gpu-jobs"
    assert {file.name: file.read_text() for file in jobs.iterdir()} == {"0": "1\n"}
    assert (agent.directory / "gpustat" / "0").read_text() == f"1 {os.getuid()}\n"
    waiter.start(2, [0, 1])
    link = HTTPConnection("127.0.0.1", port, timeout=10)
    link.request("GET", "/metrics")
    lines = set(link.getresponse().read().decode().splitlines())
    expected = {
        'cadenza_lease_gpus{state="held"} 1.0', 'cadenza_lease_gpus{state="waiting"} 2.0', "cadenza_agent_rotating 1.0",
        "cadenza_agent_service_connected 0.0", 'cadenza_agent_faults{kind="faults"} 0.0',
    }  # fmt: skip
    assert expected <= lines
    link.request("GET", "/healthz")
    assert link.getresponse().read() == b"ok\n"
    link.close()
    holder.send("end", job=1)
    until(lambda: json.dumps(sorted(file.read_text() for file in jobs.iterdir())) == '["2\\n", "2\\n"]', "the next job")
