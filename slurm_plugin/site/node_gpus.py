"""Facts and checks of ``cadenza doctor --gpu``: this node's GPUs, its driver, and what a job may pin."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from cadenza.sidecar.agent.driver import driver_trial, engine_trial, trial_record
from cadenza.sidecar.agent.driver.cuda import MIN_VERSION
from cadenza.sidecar.agent.driver.trial_record import EngineTrial, Record
from cadenza.slurm_plugin.site.checks import Finding

EXCLUSIVE = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
"""NVML's compute modes that keep a second process from a GPU (nvmlComputeMode_t)."""


class NodeGpu(msgspec.Struct, frozen=True):
    """One GPU as NVML sees it; None for what it does not tell."""

    index: int
    """Slurm's index: the number of the device file."""
    name: str
    uuid: str = ""
    memory_bytes: int | None = None
    fault: str = ""
    compute_mode: int | None = None
    mig: bool | None = None
    persistent: bool | None = None
    processes: tuple[int, ...] | None = None
    """Pids with a context."""
    foreign: tuple[int, ...] = ()
    """Those of them that this machine's /proc does not have."""


class NodeFacts(msgspec.Struct, frozen=True):
    """Input of the checks."""

    device_files: int
    """Number of /dev/nvidia0 and its like."""
    gpus: tuple[NodeGpu, ...] = ()
    nvml_problem: str = ""
    driver: str = ""
    cuda: int = 0
    """The CUDA version of the driver; 0: unknown."""
    bindings: bool = False
    """The package cuda-bindings is installed."""
    memlock_bytes: int | None = None
    """Memory that a process may lock (``ulimit -l``); None: as much as it likes."""
    objection: str = ""
    """Reason why the agent stops no job by this driver; "" after a good trial."""
    not_tried: str = ""
    """Reason why there was no trial now."""
    engine: EngineTrial = Record("").engine
    """Last trial of the offload engine."""


def gather_gpus(dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> NodeFacts:
    """Read every fact once; what is missing is a fact, not an error."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts = NodeFacts(
        sum(path.name.removeprefix("nvidia").isdigit() for path in dev.glob("nvidia*")),
        bindings=find_spec("cuda") is not None and find_spec("cuda.bindings") is not None,
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
    )
    try:
        import pynvml  # noqa: PLC0415 - the module of nvidia-ml-py, which machines without GPUs need not have
    except ImportError:
        problem = "nvidia-ml-py is not installed (pip install 'cadenza[gpu]')"
        return msgspec.structs.replace(facts, nvml_problem=problem)

    def ask(question: Callable[..., Any], *about: Any) -> Any:
        try:
            return question(*about)
        except pynvml.NVMLError:
            return None

    try:
        pynvml.nvmlInit()
        positions = range(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        return msgspec.structs.replace(facts, nvml_problem=f"NVML: {error}")
    return msgspec.structs.replace(
        facts,
        gpus=tuple(_gpu(pynvml, ask, position, proc) for position in positions),
        driver=ask(pynvml.nvmlSystemGetDriverVersion) or "",
        cuda=ask(pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0,
    )


def _gpu(nvml: Any, ask: Callable[..., Any], position: int, proc: Path) -> NodeGpu:
    """Return the facts of one GPU; one that has failed has its error only."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(position)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return NodeGpu(position, "GPU", fault=str(error))
    minor, mig = ask(nvml.nvmlDeviceGetMinorNumber, handle), ask(nvml.nvmlDeviceGetMigMode, handle)
    persistent, running = (
        ask(question, handle)
        for question in (nvml.nvmlDeviceGetPersistenceMode, nvml.nvmlDeviceGetComputeRunningProcesses)
    )
    pids = None if running is None else tuple(int(one.pid) for one in running)
    return NodeGpu(
        position if minor is None else int(minor),
        ask(nvml.nvmlDeviceGetName, handle) or "GPU",
        str(ask(nvml.nvmlDeviceGetUUID, handle) or ""),
        int(memory.total),
        compute_mode=ask(nvml.nvmlDeviceGetComputeMode, handle),
        mig=None if mig is None else bool(mig[0]),
        persistent=None if persistent is None else bool(persistent),
        processes=pids,
        foreign=tuple(pid for pid in pids or () if not (proc / str(pid)).exists()),
    )


def try_gpu(facts: NodeFacts, state_dir: Path, python: str) -> NodeFacts:
    """Try the driver's process checkpoints and the offload engine on a free GPU, and keep the record for the agent.

    ``python`` has the torch of jobs, with which the engine runs. Return the facts with record and agent's objection.
    """
    if not facts.gpus:
        return facts
    free = next((gpu for gpu in facts.gpus if gpu.processes == () and gpu.uuid and not (gpu.fault or gpu.mig)), None)
    last, not_tried = _last_record(state_dir, facts.driver), ""
    if os.geteuid():
        not_tried = "needs root"
    elif free is None:
        not_tried = "no GPU of this host is free of processes"
    else:
        if missing := _missing_for_checkpoints(facts):
            record = Record(facts.driver, missing)
        else:
            record = driver_trial.run(free.uuid, facts.driver)
        engine = engine_trial.run(python, free.uuid)
        keeps_last = engine.not_run and not last.engine.not_run
        last = msgspec.structs.replace(record, engine=last.engine if keeps_last else engine)
        try:
            trial_record.keep(state_dir, last)
        except OSError as error:
            not_tried = f"{state_dir}: {error.strerror}"
    objection = trial_record.objection(state_dir, facts.driver)
    return msgspec.structs.replace(facts, not_tried=not_tried, objection=objection, engine=last.engine)


def _last_record(state_dir: Path, driver: str) -> Record:
    """Return the record of the last trials with this driver; an empty one if there were none."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if (record := trial_record.read(state_dir)).driver == driver:
            return record
    return Record(driver)


def _missing_for_checkpoints(facts: NodeFacts) -> str:
    """Return the reason why the driver's process checkpoints cannot be tried, "" if they can."""
    if facts.cuda < MIN_VERSION:
        return "the driver has no process checkpoints"
    return "" if facts.bindings else "cuda-bindings is missing"


def examine_gpus(facts: NodeFacts, mode: str) -> Iterator[Finding]:
    """Yield the findings; ``mode`` is the setting ``agent.driver_checkpoint``."""
    if not facts.gpus:
        absent = not facts.device_files
        text = "this machine has none" if absent and not facts.nvml_problem else facts.nvml_problem or "NVML sees none"
        advice = "run it on a GPU host" if absent else "is the driver loaded? `nvidia-smi`"
        yield Finding("WARN" if absent else "FAIL", "GPUs", text, advice)
    elif facts.device_files > len(facts.gpus):
        text = f"NVML sees {len(facts.gpus)} of {facts.device_files}"
        yield Finding("FAIL", "GPUs", text, "the others have failed: see `dmesg` for Xid errors")
    for gpu in facts.gpus:
        yield from _state_of(gpu)
    yield from _checkpoints(facts, mode)
    yield from _engine(facts)
    yield _pinning(facts)


def _state_of(gpu: NodeGpu) -> Iterator[Finding]:
    """Yield the obstacles to sharing one GPU, or that there are none."""
    about = f"GPU {gpu.index}"
    if gpu.fault:
        yield Finding("FAIL", about, f"has failed: {gpu.fault}", "drain its node; no job gets it until it answers")
        return
    found = []
    if (mode := EXCLUSIVE.get(gpu.compute_mode or 0)) is not None:
        text = f"compute mode is {mode}: the context of a job that waits keeps the next one out"
        found.append(Finding("FAIL", about, text, f"nvidia-smi -i {gpu.index} -c DEFAULT"))
    if gpu.mig:
        text = "it is divided (MIG): NVML tells little of its parts, and process checkpoints refuse them"
        found.append(Finding("WARN", about, text, f"nvidia-smi -i {gpu.index} -mig 0, for GPUs that take turns whole"))
    if gpu.persistent is False:
        text = "persistence mode is off: the driver leaves with the last process, and process checkpoints need it"
        found.append(Finding("WARN", about, text, f"nvidia-smi -i {gpu.index} -pm 1, or nvidia-persistenced"))
    if gpu.processes is None:
        text = "the driver does not name its processes: a job's word alone says that it has left"
        found.append(Finding("WARN", about, text))
    elif gpu.foreign:
        text = f"NVML names pid {gpu.foreign[0]}, which is none of this machine's"
        found.append(
            Finding("WARN", about, text, "the agent must run outside of containers, in the host's pid namespace")
        )
    yield from found
    if not found:
        memory = f", {gpu.memory_bytes >> 20} MiB" if gpu.memory_bytes is not None else ""
        count = len(gpu.processes or ())
        yield Finding("OK", about, f"{gpu.name}{memory}, {count} process{'' if count == 1 else 'es'} seen")


def _checkpoints(facts: NodeFacts, mode: str) -> Iterator[Finding]:
    """Yield whether the driver path can work here; without it only its setting makes that a problem."""
    if not facts.gpus:
        return
    wanted = mode != "off"
    version = f"driver {facts.driver or 'unknown'}, CUDA {facts.cuda // 1000}.{facts.cuda % 1000 // 10}"
    if not facts.cuda:
        yield Finding("WARN", "process checkpoints", "NVML does not tell the driver's CUDA version")
    elif facts.cuda < MIN_VERSION:
        text = f"{version}: it has none"
        advice = f'they need driver 570; set driver_checkpoint = "off", it is "{mode}"' if wanted else ""
        yield Finding("FAIL" if wanted else "OK", "process checkpoints", text, advice)
    elif wanted and not facts.bindings:
        yield Finding("FAIL", "process checkpoints", "cuda-bindings is missing", "pip install 'cadenza[driver]'")
    elif facts.objection:
        now = f" (not tried now: {facts.not_tried})" if facts.not_tried else ""
        advice = "agent.driver_checkpoint has no effect until a trial passes" if wanted else ""
        yield Finding("FAIL" if wanted else "OK", "process checkpoints", f"{version}: {facts.objection}{now}", advice)
    else:
        yield Finding("OK", "process checkpoints", f"{version}: a trial passed; agent.driver_checkpoint is {mode}")


def _engine(facts: NodeFacts) -> Iterator[Finding]:
    """Yield the last trial of the offload engine."""
    engine, about = facts.engine, "offload engine"
    if not facts.gpus:
        return
    if engine.failed:
        advice = "jobs that attach may lose a turn here, and agent.driver_checkpoint has no effect until a trial passes"
        yield Finding("FAIL", about, f"the trial failed: {engine.failed}", advice)
    elif engine.not_run:
        advice = "name a Python that has the torch of jobs: doctor --gpu --python PATH"
        yield Finding("WARN", about, f"not run: {facts.not_tried or engine.not_run}", advice)
    else:
        seen = "not shown by NVML" if engine.kept_bytes is None else f"{engine.kept_bytes >> 20} MB by NVML"
        text = (
            f"a trial passed with torch {engine.torch}: {engine.bytes >> 20} MB out in {engine.out_s:.2f} s, "
            f"back in {engine.back_s:.2f} s; {engine.left_bytes >> 20} MB stayed by torch, {seen}"
        )
        advice = "" if engine.pinned else "host memory was not pinned, so that moves are slower: see pinned memory"
        yield Finding("OK" if engine.pinned else "WARN", about, text, advice)


def _pinning(facts: NodeFacts) -> Finding:
    """Return whether a process like this one may lock the memory of a whole GPU."""
    largest = max((gpu.memory_bytes or 0 for gpu in facts.gpus), default=0)
    if facts.memlock_bytes is None or facts.memlock_bytes >= largest > 0:
        return Finding("OK", "pinned memory", "not limited" if facts.memlock_bytes is None else "enough for a GPU")
    text = f"this shell may lock {facts.memlock_bytes >> 10} KiB (ulimit -l); where jobs may not pin, moves are slower"
    return Finding("WARN", "pinned memory", text, "set LimitMEMLOCK=infinity in slurmd's unit, and "
                   "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")  # fmt: skip
