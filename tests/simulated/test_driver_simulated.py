"""NVML and the driver's process checkpoint on the simulated GPU: the agent sees what jobs have there, and moves it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import simulated_gpu
import torch
from simulated_gpu import occupied

from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import survey

pytestmark = pytest.mark.slow

LOOK = """
import json
from cadenza.sidecar.agent.telemetry.gpus import nvml_devices
(gpu,) = nvml_devices()
print(json.dumps([gpu.index, gpu.memory().fault, gpu.memory().free, gpu.look().memory_bytes, gpu.processes()]))
"""
SAMPLE = """
import json, sys
from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.telemetry.gpus import nvml_devices
from cadenza.sidecar.agent.telemetry.sampler import Sampler, Target
from cadenza.sidecar.clock import SystemClock
sampler = Sampler(SystemClock(), nvml_devices)
jobs = [Target(JobKey(pid, 0), (int(pid),), (0,)) for pid in sys.argv[1:]]
for line in sys.stdin:
    print(json.dumps([[one.gpu_percent, one.gpu_memory_bytes] for one in sampler.sample(jobs).values()]), flush=True)
"""
"""A sampler that looks at the jobs whose pids it is given, at each line that it reads."""
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
OUT_OF_MEMORY, ILLEGAL_STATE = 2, 401


def seen_by_the_agent() -> dict[str, Any]:
    """Return the GPU as the agent sees it through NVML."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulated_gpu.driver_libraries())}
    output = subprocess.check_output([sys.executable, "-c", LOOK], env=environment, text=True)
    index, fault, free, used, processes = json.loads(output)
    assert index == 0
    return {
        "fault": fault,
        "free": free,
        "used": used,
        "processes": {int(pid): size for pid, size in processes.items()},
    }


def test_the_agent_sees_the_processes_and_bytes_of_jobs_and_that_a_yield_frees_the_gpu() -> None:
    gpu, offload, me = simulated_gpu.GPU, Offload(), os.getpid()
    tensors = [torch.ones(24 << 20, dtype=torch.uint8, device="simulated")]
    with occupied(gpu, 10 << 20) as neighbor:
        here = gpu.context_bytes + (24 << 20)
        seen = seen_by_the_agent()
        assert seen["processes"] == {me: here, neighbor.pid: 10 << 20}
        assert seen["used"] == here + (10 << 20) == gpu.capacity - seen["free"]
        offload.offload(survey([("tensors", tensors)]).segments)
        neighbor.kill()
        neighbor.wait()
        assert seen_by_the_agent()["processes"] == {me: gpu.context_bytes}
    offload.restore()
    assert int(tensors[0].cpu().min()) == 1
    offload.close()
    gpu.lost = 1
    assert "lost" in seen_by_the_agent()["fault"].lower()


def test_the_sampler_tells_a_busy_job_from_an_idle_one() -> None:
    gpu, me, tensor = simulated_gpu.GPU, os.getpid(), torch.zeros(1 << 20, dtype=torch.uint8, device="simulated")
    torch.accelerator.synchronize()
    with occupied(gpu, 10 << 20) as neighbor:
        sampling = subprocess.Popen(
            [sys.executable, "-c", SAMPLE, str(me), str(neighbor.pid)],
            env={**os.environ, "LD_LIBRARY_PATH": str(simulated_gpu.driver_libraries())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def sampled() -> Any:
            assert sampling.stdin is not None
            assert sampling.stdout is not None
            print(file=sampling.stdin, flush=True)
            return json.loads(sampling.stdout.readline())

        try:
            # The neighbor is a child of this process, whose job therefore has all of the GPU.
            sizes = [gpu.bytes_of[me] + (10 << 20), 10 << 20]
            assert sampled() == [[0.0, size] for size in sizes]
            gpu.operator_ns = 20_000_000
            for _ in range(20):
                tensor.add_(1)
            torch.accelerator.synchronize()
            (busy, size), idle = sampled()
            assert busy > 50
            assert (size, idle) == (sizes[0], [0.0, sizes[1]])
            assert sampled() == [[0.0, size] for size in sizes]
        finally:
            sampling.kill()
            sampling.communicate()


def test_a_process_checkpoint_stops_the_queues_and_takes_the_bytes_away() -> None:
    gpu, me = simulated_gpu.GPU, os.getpid()
    driver = ctypes.CDLL(str(simulated_gpu.driver_libraries() / "libcuda.so.1"))
    tensor = torch.full((24 << 20,), 6, dtype=torch.uint8, device="simulated")
    torch.accelerator.synchronize()
    place = tensor.data_ptr()
    before = gpu.bytes_of[me]
    assert driver.cuCheckpointProcessLock(me, ctypes.byref(ctypes.c_uint(1000))) == 0
    tensor.add_(1)
    done = torch.accelerator.current_stream().record_event()
    assert driver.cuCheckpointProcessCheckpoint(me, None) == 0
    assert gpu.bytes_of[me] == 0
    assert driver.cuCheckpointProcessCheckpoint(me, None) == ILLEGAL_STATE
    with occupied(gpu, gpu.capacity):  # another process has the whole GPU in between
        assert not done.query()
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(place)
            assert memory.read(24 << 20).strip(b"\0") == b"", "the content has left the device"
    assert driver.cuCheckpointProcessRestore(me, None) == 0
    assert driver.cuCheckpointProcessUnlock(me, None) == 0
    done.synchronize()
    assert (gpu.bytes_of[me], int(tensor.cpu().min())) == (before, 7)


def test_a_restore_without_room_is_a_failure_for_good() -> None:
    gpu = simulated_gpu.GPU
    driver = ctypes.CDLL(str(simulated_gpu.driver_libraries() / "libcuda.so.1"))
    with occupied(gpu, 40 << 20) as victim:
        assert driver.cuCheckpointProcessLock(victim.pid, ctypes.byref(ctypes.c_uint(1000))) == 0
        assert driver.cuCheckpointProcessCheckpoint(victim.pid, None) == 0
        with occupied(gpu, 40 << 20):
            assert driver.cuCheckpointProcessRestore(victim.pid, None) == OUT_OF_MEMORY
        assert driver.cuCheckpointProcessRestore(victim.pid, None) == ILLEGAL_STATE
        state = ctypes.c_int()
        assert (driver.cuCheckpointProcessGetState(victim.pid, ctypes.byref(state)), state.value) == (0, FAILED)
