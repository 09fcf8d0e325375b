"""Jobs' use of the host, measured on real processes; only the GPUs are fakes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from agent_rig import until

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.pages import OrderTimes, PageRecord
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease, Process
from cadenza.sidecar.agent.telemetry import gpus
from cadenza.sidecar.agent.telemetry.collector import Collector, Stretch, joined
from cadenza.sidecar.agent.telemetry.gpus import FIND_AGAIN_S, GpuFinder, GpuMemory, GpuUse, ProcessUse, nvml_devices
from cadenza.sidecar.agent.telemetry.records import Records
from cadenza.sidecar.agent.telemetry.sampler import Background, Sampler, Target, Usage
from cadenza.sidecar.agent_settings import AgentSettings, AgentTable
from cadenza.sidecar.clock import SystemClock

BUSY = Path(__file__).with_name("busy_job.py")
KEY = JobKey(7, 0)
MIB = 1 << 20
PAUSE_S = 0.3


@pytest.fixture
def busy() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start jobs that burn CPU and hold memory; they end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(BUSY), *flags]
        job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        started.append(job)
        return job

    yield start
    for job in started:
        job.kill()
        job.wait()
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.close()
        job.stdout.close()


def sampler(*devices: Any) -> Sampler:
    return Sampler(SystemClock(), lambda: devices)


def twice(taken: Sampler, target: Target) -> tuple[Usage, Usage]:
    """Return two samples of one job with some work in between."""
    first = taken.sample([target])[target.key]
    time.sleep(PAUSE_S)
    return first, taken.sample([target])[target.key]


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    return sum(sum(one.cpu_times()[:2]) for one in (psutil.Process(pid), *psutil.Process(pid).children()))


def test_a_job_is_itself_and_its_loader_workers(busy: Callable[..., subprocess.Popen[str]]) -> None:
    job = busy("--workers", "2", "--megabytes", "40")
    other = busy("--megabytes", "10")
    taken = sampler()
    before, began = cpu_s(job.pid), time.monotonic()
    first, second = twice(taken, Target(KEY, (job.pid,)))
    spent, span = cpu_s(job.pid) - before, time.monotonic() - began
    assert (first.processes, first.cpu_percent, first.gpu_percent) == (3, None, None)
    assert second.processes == 3
    assert second.cpu_percent is not None
    assert 0 < second.cpu_percent * PAUSE_S / 100 < spent + 0.05
    assert second.cpu_percent < 300
    assert span > PAUSE_S
    assert 120 * MIB < second.rss_bytes < 200 * MIB
    assert taken.sample([Target(KEY, (other.pid,))])[KEY].processes == 1


def test_a_process_of_two_jobs_trees_counts_once(busy: Callable[..., subprocess.Popen[str]]) -> None:
    job = busy("--workers", "1")
    child = psutil.Process(job.pid).children()[0].pid
    assert sampler().sample([Target(KEY, (child, job.pid))])[KEY].processes == 2


def test_bytes_written_are_seen(tmp_path: Path) -> None:
    taken = sampler()
    me = Target(KEY, (os.getpid(),))
    taken.sample([me])
    with (tmp_path / "data").open("wb") as file:
        file.write(os.urandom(4 * MIB))
        file.flush()
        os.fsync(file.fileno())
    used = taken.sample([me])[KEY]
    assert used.write_bytes_s is not None
    assert used.read_bytes_s is not None
    assert used.write_bytes_s >= 0


def test_a_job_whose_processes_are_gone_uses_nothing() -> None:
    assert sampler().sample([Target(KEY, (2**22 + 1,))])[KEY] == Usage()


# --- GPUs ------------------------------------------------------------------------------------------------------


@dataclass
class FakeGpu:
    """A GPU that shows what a test wants."""

    index: int
    use: GpuUse = field(default_factory=GpuUse)
    divided: bool = False

    def look(self) -> GpuUse:
        return self.use


def test_a_shared_gpu_is_divided_by_process(busy: Callable[..., subprocess.Popen[str]]) -> None:
    job = busy("--workers", "1")
    worker = psutil.Process(job.pid).children()[0].pid
    uses = {job.pid: ProcessUse(40.0, 3 * MIB), worker: ProcessUse(5.0, MIB), 1: ProcessUse(30.0, 9 * MIB)}
    shared = FakeGpu(2, GpuUse(75.0, 20 * MIB, uses))
    idle = FakeGpu(3, GpuUse(0.0, MIB))
    foreign = FakeGpu(0, GpuUse(99.0, 99 * MIB, {job.pid: ProcessUse(99.0, 99 * MIB)}))
    used = sampler(foreign, shared, idle).sample([Target(KEY, (job.pid,), gpus=(2, 3, 9))])[KEY]
    assert used.gpu_percent == (45.0 + 0.0) / 2
    assert used.gpu_memory_bytes == 4 * MIB


@pytest.mark.parametrize(("others", "percent", "memory"), [({}, 60.0, 8 * MIB), ({1: ProcessUse()}, None, None)])
def test_where_processes_are_not_told_apart_only_a_sole_job_has_it_all(
    others: dict[int, ProcessUse], percent: float | None, memory: int | None
) -> None:
    gpu = FakeGpu(0, GpuUse(60.0, 8 * MIB, {os.getpid(): ProcessUse(), **others}))
    used = sampler(gpu).sample([Target(KEY, (os.getpid(),), gpus=(0,))])[KEY]
    assert (used.gpu_percent, used.gpu_memory_bytes) == (percent, memory)


@pytest.mark.parametrize("uses", [None, {2**22 + 1: ProcessUse(99.0, MIB)}])
def test_processes_that_are_not_named_are_no_idle_gpu(uses: dict[int, ProcessUse] | None) -> None:
    """Packing takes a job without use for an idle one; NVML may fail, or name pids of another namespace."""
    used = sampler(FakeGpu(0, GpuUse(97.0, 8 * MIB, uses))).sample([Target(KEY, (os.getpid(),), gpus=(0,))])[KEY]
    assert (used.gpu_percent, used.gpu_memory_bytes) == (None, None)


def test_gpus_are_searched_for_again_while_there_are_none() -> None:
    """An agent may start before the driver has."""
    clock, found = Moving(), list[Any]()
    finder = GpuFinder(clock, lambda: tuple(found))
    assert finder.devices() == ()
    found.append(FakeGpu(0))
    assert finder.devices() == ()
    clock.time_s += FIND_AGAIN_S
    assert finder.devices() == tuple(found)
    found.clear()
    clock.time_s += FIND_AGAIN_S
    assert len(finder.devices()) == 1


class TestLostGpus:
    """NVML with three GPUs, of which it loses some; handles are the device files' numbers."""

    @pytest.fixture
    def nvml(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        pynvml = pytest.importorskip("pynvml")
        lost = set[int]()

        def answer(value: Any) -> Callable[..., Any]:
            def ask(handle: int, *_: object, **__: object) -> Any:
                if handle in lost:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
                return value(handle)

            return ask

        for name, value in {
            "HandleByIndex": lambda handle: handle,
            "MinorNumber": lambda handle: handle,
            "UtilizationRates": lambda _: SimpleNamespace(gpu=50),
            "MemoryInfo": lambda _: SimpleNamespace(used=3 * MIB, free=5 * MIB, total=8 * MIB),
            "ComputeRunningProcesses": lambda _: [SimpleNamespace(pid=os.getpid(), usedGpuMemory=2 * MIB)],
            "ProcessUtilization": lambda _: [SimpleNamespace(pid=os.getpid(), timeStamp=1, smUtil=40)],
        }.items():
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer(value))
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
        return lost

    def test_one_lost_gpu_hides_no_other(self, nvml: set[int], tmp_path: Path) -> None:
        for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
            (tmp_path / name).touch()
        nvml.add(1)
        found = {device.index: device for device in nvml_devices(tmp_path)}
        assert sorted(found) == [0, 1, 2]
        assert "lost" in found[1].memory().fault.lower()
        assert (found[1].processes(), found[1].memory().free, found[1].look().processes) == (None, None, None)
        assert found[2].memory() == GpuMemory(5 * MIB, 8 * MIB)
        assert found[2].processes() == {os.getpid(): 2 * MIB}
        assert found[2].look() == GpuUse(50.0, 3 * MIB, {os.getpid(): ProcessUse(40.0, 2 * MIB)})

    @pytest.mark.parametrize(
        ("answer", "percent"), [([], 0.0), ("NVML_ERROR_NOT_FOUND", 0.0), ("NVML_ERROR_NOT_SUPPORTED", None)]
    )
    def test_a_process_without_a_sample_is_idle_where_the_gpu_tells_processes_apart(
        self, nvml: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, percent: float | None
    ) -> None:
        pynvml = sys.modules["pynvml"]

        def samples(*_: object) -> Any:
            if isinstance(answer, str):
                raise pynvml.NVMLError(getattr(pynvml, answer))
            return answer

        monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", samples)
        look = nvml_devices(tmp_path)[0].look()
        assert look.processes == {os.getpid(): ProcessUse(percent, 2 * MIB)}

    def test_a_gpu_that_is_lost_later_is_not_idle(self, nvml: set[int], tmp_path: Path) -> None:
        (gpu, *_) = nvml_devices(tmp_path)
        nvml.add(0)
        assert "lost" in gpu.memory().fault.lower()
        assert gpu.look() == GpuUse(None, None, None)


class TestWithoutNvml:
    @pytest.fixture(autouse=True)
    def heard(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, gpus.__name__)

    def test_no_library_is_one_line(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        taken = Sampler(SystemClock(), nvml_devices)
        for _ in range(2):
            assert taken.sample([Target(KEY, (os.getpid(),), (0,))])[KEY].gpu_percent is None
        assert [record.message for record in caplog.records] == [
            "GPUs are not sampled: nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        ]

    def test_no_driver_is_one_line(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        pynvml = pytest.importorskip("pynvml")

        def no_driver() -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
        assert nvml_devices() == ()
        assert "NVML:" in caplog.text


# --- in the background -----------------------------------------------------------------------------------------


class Stuck:
    """A GPU whose driver does not come back until it is let go."""

    index, divided = 0, False

    def __init__(self) -> None:
        self.free = threading.Event()

    def look(self) -> GpuUse:
        self.free.wait(20)
        return GpuUse()


class Moving:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def monotonic(self) -> float:
        return self.time_s

    def now(self) -> float:
        return self.time_s


def collector(*devices: Any) -> tuple[Collector, Moving]:
    settings = AgentSettings(AgentTable(records="off"))
    clock = Moving()
    host = Host(settings, clock, "n1")
    lease = Lease(KEY.id, KEY.restart, os.getuid(), (0,), 0.0)
    host.leases.register(lease, 0.0).processes = (Process(os.getpid(), 1),)
    return Collector(host, Background(sampler(*devices)), Records(settings)), clock


def sampled(collected: Collector) -> bool:
    collected.tick()
    return collected.latest(KEY) is not None


def test_samples_come_when_they_are_due() -> None:
    collected, clock = collector()
    assert not sampled(collected)
    until(lambda: sampled(collected), "a first sample")
    first = collected.latest(KEY)
    clock.time_s += 4.9
    assert not collected.background.busy
    collected.tick()
    assert not collected.background.busy
    clock.time_s += 0.2
    collected.tick()
    until(lambda: sampled(collected) and collected.latest(KEY) is not first, "a second sample")
    second = collected.latest(KEY)
    assert first is not None
    assert second is not None
    assert (first.window_s, second.window_s) == (0.0, pytest.approx(5.1))
    assert first.processes >= 1
    assert second.rss_mb is not None
    collected.close()


def test_a_driver_that_hangs_costs_samples_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck()
    collected, clock = collector(stuck)
    for _ in range(4):
        clock.time_s += 5.1
        collected.tick()
    latest = collected.latest(KEY)
    assert latest is not None
    assert latest.processes == 0
    assert caplog.text.count("has not come back") == 1
    stuck.free.set()
    until(lambda: sampled(collected) and collected.latest(KEY).processes, "a sample after the driver came back")
    collected.close()


def test_a_sampler_that_fails_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        index = 0

        def look(self) -> GpuUse:
            raise RuntimeError("the driver is of another version")

    background = Background(sampler(Broken()))
    for _ in range(2):
        background.ask([Target(KEY, ())])
        assert until(lambda: [background.answer()] if not background._answers.empty() else [], "an answer") == [{}]
    assert caplog.text.count("could not be sampled") == 1
    background.close()


# --- joining ---------------------------------------------------------------------------------------------------


def record(step: int, busy_s: float, **fields: Any) -> PageRecord:
    counts = [0] * wire.FINE_BUCKETS
    counts[wire.fine_bucket(int(busy_s / step * 1e9))] = step
    known = {"samples": 0, "waited_s": 0.0, "memory_kind": 0, "memory_low": 0, "memory_peak": 0, "orders": ()}
    return PageRecord(step, step, busy_s, counts=counts, fine=True, **{**known, **fields})


def test_ranks_and_processes_become_one_record() -> None:
    fast = Stretch(
        record(100, 10.0, samples=800, waited_s=1.0),
        record(150, 15.0, samples=1200, waited_s=2.0, memory_kind=wire.MEMORY_GPU, memory_peak=5 * MIB, memory_low=MIB,
               orders=(OrderTimes(4, 9.0, 0.1, 0.4),)),
    )  # fmt: skip
    slow = Stretch(
        record(100, 20.0, samples=800, waited_s=3.0),
        record(149, 30.0, samples=1192, waited_s=5.0, memory_kind=wire.MEMORY_GPU, memory_peak=7 * MIB,
               memory_low=3 * MIB, orders=(OrderTimes(3, 5.0, 9.0, 9.0), OrderTimes(4, 9.0, 0.2, 0.0))),
    )  # fmt: skip
    usage = Usage(3, 10 * MIB, 150.0, 2.0 * MIB, 1.0 * MIB, 80.0, 6 * MIB)
    one = joined(8.0, usage, [fast, slow])
    assert (one.iterations, one.samples_s) == (50, (400 + 392) / 8)
    assert one.iteration_p50_s == pytest.approx(30 / 149, rel=0.06)
    assert one.data_wait == pytest.approx(3 / 15, abs=1e-4)
    assert (one.processes, one.cpu_percent, one.rss_mb, one.read_mb_s, one.write_mb_s) == (3, 150.0, 10.0, 2.0, 1.0)
    assert (one.gpu_percent, one.gpu_memory_mb) == (80.0, 6.0)
    assert (one.memory_kind, one.memory_low_mb, one.memory_peak_mb) == ("gpu", 3.0, 7.0)
    assert (one.order_arrived_s, one.order_done_s) == (0.2, 0.4)


def test_a_rank_that_brings_its_counts_along_did_not_make_them_now() -> None:
    came = Stretch(None, record(1000, 100.0, samples=9000))
    one = joined(5.0, None, [came])
    assert (one.iterations, one.samples_s, one.data_wait) == (0, None, None)
    assert one.iteration_p99_s == pytest.approx(0.1, rel=0.06)


def test_a_job_that_never_attached_has_its_processes_only() -> None:
    one = joined(5.0, Usage(1, 2 * MIB, 3.0, 0.0, 0.0), [])
    assert (one.processes, one.rss_mb, one.iterations, one.iteration_p50_s, one.memory_kind) == (1, 2.0, 0, None, "")
