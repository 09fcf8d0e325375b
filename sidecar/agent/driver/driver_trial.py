"""Trial of the driver's process checkpoints on one free GPU, with a process of our own, and its record.

``python -m cadenza.sidecar.agent.driver.driver_trial UUID DRIVER`` prints the record; without words it is that process.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from typing import Any

import msgspec

from cadenza.policies.core.text import printable
from cadenza.sidecar.agent.driver.cuda import Cuda, CudaError, bindings
from cadenza.sidecar.agent.driver.inspection import MIN_UVM_BYTES, mapped_managed_bytes
from cadenza.sidecar.agent.driver.machine import MAX_LEFT_BYTES
from cadenza.sidecar.agent.driver.trial_record import Record
from cadenza.sidecar.agent.errors import AgentError
from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, nvml_devices
from cadenza.sidecar.clock import Clock, SystemClock

TRIAL_BYTES = 128 << 20
"""Memory of each kind that the process takes, on the GPU, pinned and managed: more than may stay or go unnoticed."""
DONE = "done"
LOCK_MS = 10_000
LIMIT_S = 120.0
"""Longest time for a trial, in seconds."""
MAX_TEXT = 300


class TrialError(AgentError):
    """The driver has failed the trial; the message says in which step."""


def run(uuid: str, driver: str) -> Record:
    """Try the driver on the GPU with a UUID, in a process of its own, because a call may never return."""
    command = [sys.executable, "-m", __name__, uuid, driver]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return Record(driver, f"a call has not returned within {LIMIT_S:g} s")
        finally:
            _end_group(process.pid)
    try:
        return msgspec.json.decode(output, type=Record)
    except msgspec.DecodeError:
        last = (errors.decode(errors="replace").splitlines() or ["it says nothing"])[-1]
        return Record(driver, printable(f"its process ended with {process.returncode}: {last}", MAX_TEXT))


def _end_group(leader: int) -> None:
    """End what a trial has left of its processes."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def rule_problem(plain: int, managed: int | None) -> str:
    """Return the reason why the rule by which a job with managed memory is left alone does not fit a driver.

    The bytes are mappings of /dev/nvidia-uvm of a process without managed memory, and with some, if there is any.
    """
    if plain > MIN_UVM_BYTES:
        return f"a process without managed memory maps {plain >> 20} MB of /dev/nvidia-uvm: all jobs would be refused"
    if managed is not None and managed <= MIN_UVM_BYTES:
        return "managed memory does not show in a process's mappings: jobs that have some would be stopped"
    return ""


class Trial:
    """One trial: a process with known memory is checkpointed and restored, and compares it."""

    def __init__(self, subject: subprocess.Popen[str], clock: Clock) -> None:
        self._subject, self._clock = subject, clock
        self._cuda = Cuda()
        if (said := self._ask("begin")) != DONE:
            raise TrialError(said)
        self._gpu: GpuDevice | None = next((gpu for gpu in nvml_devices() if self._bytes(gpu)), None)

    def record(self, driver: str) -> Record:
        """Return the record of a trial that passed; raise TrialError or CudaError at the first step that fails."""
        pid, held = self._subject.pid, self._bytes(self._gpu)
        if held < TRIAL_BYTES:
            raise TrialError("NVML does not show the memory of a process: MIG, or pids of another namespace")
        plain = mapped_managed_bytes(pid)
        self._cuda.lock(pid, LOCK_MS)
        checkpoint_s = self._timed(self._cuda.checkpoint)
        # The driver calls a process checkpointed; only NVML shows that the GPU's memory is free.
        if (left := self._bytes(self._gpu)) > MAX_LEFT_BYTES:
            raise TrialError(f"{left >> 20} MB stay on the GPU after a checkpoint")
        restore_s = self._timed(self._cuda.restore)
        self._cuda.unlock(pid)
        if (said := self._ask("compare")) != "same":
            raise TrialError(f"the memory's content after a restore: {said}")
        managed = mapped_managed_bytes(pid) if self._ask("managed") == DONE else None
        if problem := rule_problem(plain, managed):
            raise TrialError(problem)
        return Record(driver, "", held, checkpoint_s, restore_s, plain, managed)

    def _timed(self, call: Any) -> float:
        began = self._clock.monotonic()
        call(self._subject.pid)
        return self._clock.monotonic() - began

    def _bytes(self, gpu: GpuDevice | None) -> int:
        """Return the process's memory on a GPU by NVML."""
        return ((gpu and gpu.processes()) or {}).get(self._subject.pid) or 0

    def _ask(self, word: str) -> str:
        print(word, file=self._subject.stdin, flush=True)
        if not (said := self._subject.stdout.readline().strip() if self._subject.stdout else ""):
            raise TrialError("the process on the GPU has ended")
        return said


class Subject:
    """The process on the GPU: it fills memory there, and obeys words."""

    def __init__(self) -> None:
        self._driver = bindings()
        self._content = random.Random(TRIAL_BYTES).randbytes(TRIAL_BYTES)  # noqa: S311 - content to compare
        self._place: Any = None

    def obey(self, word: str) -> str:
        """Return the answer to a word: what was done, or the driver's error."""
        try:
            return getattr(self, f"_{word}")() or DONE
        except CudaError as error:
            return str(error)

    def _begin(self) -> None:
        self._call("cuInit", 0)
        context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", 0))
        self._call("cuCtxSetCurrent", context)
        self._place = self._call("cuMemAlloc", TRIAL_BYTES)
        self._call("cuMemcpyHtoD", self._place, self._content, TRIAL_BYTES)
        self._call("cuMemHostAlloc", TRIAL_BYTES, 0)

    def _compare(self) -> str:
        now = bytearray(TRIAL_BYTES)
        self._call("cuMemcpyDtoH", now, self._place, TRIAL_BYTES)
        return "same" if now == self._content else "different"

    def _managed(self) -> None:
        everywhere = self._driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
        self._call("cuMemsetD8", self._call("cuMemAllocManaged", TRIAL_BYTES, everywhere), 1, TRIAL_BYTES)
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._driver, name)(*arguments)
        if int(error):
            raise CudaError(f"{name}: {getattr(error, 'name', error)}")
        return values[0] if values else None


def main(uuid: str, driver: str) -> None:
    """Try the driver, and print the record."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    command = [sys.executable, "-m", "cadenza.sidecar.agent.driver.driver_trial"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            record = Trial(process, SystemClock()).record(driver)
        except AgentError as error:
            record = Record(driver, printable(str(error), MAX_TEXT))
        finally:
            process.kill()
    sys.stdout.write(msgspec.json.encode(record).decode())


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        process = Subject()
        for line in sys.stdin:
            sys.stdout.write(f"{process.obey(line.strip())}\n")
            sys.stdout.flush()
