"""A simulated GPU: torch's device type ``simulated``, built once from gpu.cpp; see README.md.

``create()`` makes a GPU, a file that all its processes share; ``load()`` makes it a device of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
SOURCES = ("gpu.cpp", "memory.hpp", "streams.hpp", "gpu_file.h")
BUILD = HERE.parents[1] / "build" / "simulated"
PATHS = "SIMULATED_GPUS"
"""Environment variable with the files of the GPUs that a process sees, separated by colons."""
OWNERS = 64


class Owner(ctypes.Structure):
    """GpuOwner of gpu_file.h: one process and its bytes."""

    _fields_ = [(name, ctypes.c_int64) for name in ("pid", "started", "bytes", "saved", "state", "busy_ns", "memory")]


class Gpu(ctypes.Structure):
    """GpuFile of gpu_file.h: its words can be read and set while jobs use the GPU."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("capacity", ctypes.c_int64),
        ("context_bytes", ctypes.c_int64),
        ("bytes_per_s", ctypes.c_int64),
        ("operator_ns", ctypes.c_int64),
        ("pin_ns_per_page", ctypes.c_int64),
        ("fail_allocation", ctypes.c_int64),
        ("fail_registration", ctypes.c_int64),
        ("fail_copy", ctypes.c_int64),
        ("fail_creation", ctypes.c_int64),
        ("drop_copy", ctypes.c_int64),
        ("hang", ctypes.c_int64),
        ("lost", ctypes.c_int64),
        ("owners", Owner * OWNERS),
    ]

    @property
    def bytes_of(self) -> dict[int, int]:
        """Return the bytes of each process on the GPU."""
        return {owner.pid: owner.bytes for owner in self.owners if owner.pid}


def compiler() -> str | None:
    """Return the C++ compiler, None without one."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def library() -> ctypes.CDLL:
    """Return the backend, built if this version of its sources was not built yet for this torch."""
    text = b"".join((HERE / name).read_bytes() for name in SOURCES) + f"{torch.__version__} {sys.version}".encode()
    target = BUILD / hashlib.sha256(text).hexdigest()[:16] / "simulated.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(target)
    found = ctypes.CDLL(str(target))
    found.simulated_snapshot.restype = found.simulated_random.restype = ctypes.c_size_t
    found.simulated_seed.argtypes = [ctypes.c_uint64]
    found.simulated_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.simulated_unregister.argtypes = [ctypes.c_void_p]
    return found


def _build(target: Path) -> None:
    """Compile the backend against the torch that is installed."""
    from torch.utils import cpp_extension  # noqa: PLC0415 - takes a second, and only the first run builds

    found = compiler()
    if found is None:
        raise RuntimeError("the simulated GPU needs a C++ compiler (g++)")
    command = [found, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-o", f"{target}.new", str(HERE / "gpu.cpp"), "-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run(command, check=True)
    Path(f"{target}.new").rename(target)


@functools.cache
def driver_libraries() -> Path:
    """Return a directory with the stand-in for the driver under the names of its libraries, for LD_LIBRARY_PATH."""
    source = HERE.parent / "agent" / "stub_driver.c"
    text = source.read_bytes() + (HERE / "gpu_file.h").read_bytes()
    folder = BUILD / f"driver-{hashlib.sha256(text).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        if not (folder / name).exists():
            built = folder / f"{name}.{os.getpid()}"
            subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(built), str(source), "-ldl"], check=True)
            built.rename(folder / name)
    return folder


@functools.cache
def preloaded() -> dict[str, str]:
    """Return the environment of a process whose memory on the simulated GPU keeps its addresses."""
    source = HERE.parents[1] / "sidecar" / "agent" / "addresses"
    text = b"".join((source / name).read_bytes() for name in ("addresses.c", "addresses.h", "Makefile"))
    folder = BUILD / f"addresses-{hashlib.sha256(text).hexdigest()[:16]}"
    if not folder.exists():
        copy = BUILD / f"{folder.name}.{os.getpid()}"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so"))
        subprocess.run(["make", "--silent", "-C", str(copy)], check=True)
        with contextlib.suppress(OSError):  # another process was first
            copy.rename(folder)
    return {
        "LD_PRELOAD": str(folder / "libcadenza-addresses.so"),
        "LD_LIBRARY_PATH": str(driver_libraries()),
        "NCCL_GRAPH_REGISTER": "0",
    }


def create(path: Path, capacity: int = 64 << 20, **words: int) -> Gpu:
    """Make a GPU of a capacity in bytes; further words of its file by name."""
    if error := library().simulated_create(os.fsencode(path)):
        raise OSError(error, os.strerror(error), str(path))
    gpu = open_file(path)
    for name, value in {"capacity": capacity, **words}.items():
        setattr(gpu, name, value)
    return gpu


def open_file(path: Path) -> Gpu:
    """Return the words of a GPU's file, shared with all its processes."""
    import mmap  # noqa: PLC0415

    with path.open("r+b") as file:
        return Gpu.from_buffer(mmap.mmap(file.fileno(), 0))


def snapshot() -> list[dict[str, Any]]:
    """Return the allocator's segments in the form of ``torch.cuda.memory_snapshot()``."""
    size = 1 << 20
    while True:
        text = ctypes.create_string_buffer(size)
        size = library().simulated_snapshot(text, ctypes.c_size_t(len(text))) + 1
        if size <= len(text):
            return [segment for one in json.loads(text.value) for segment in one]


def random_state(index: int) -> torch.Tensor:
    """Return the state of a device's random numbers."""
    state = torch.empty(library().simulated_random(index, None, 0), dtype=torch.uint8)
    library().simulated_random(index, ctypes.c_void_p(state.data_ptr()), 0)
    return state


def set_random_state(state: torch.Tensor, index: int) -> None:
    """Set it."""
    library().simulated_random(index, ctypes.c_void_p(state.data_ptr()), 1)


def free_and_total(gpu: Gpu) -> tuple[int, int]:
    """Return the bytes of a GPU that no process has, and all of them."""
    alive = [nbytes for pid, nbytes in gpu.bytes_of.items() if Path(f"/proc/{pid}").exists()]
    return gpu.capacity - sum(alive), gpu.capacity


def load(paths: Sequence[Path] | None = None) -> None:
    """Make the simulated GPUs devices of this process, those of the environment by default; once, before their use."""
    if paths is not None:
        os.environ[PATHS] = ":".join(map(str, paths))
    import simulated_accelerator  # noqa: PLC0415 - the backend builds where there is no Cadenza yet

    torch.utils.rename_privateuse1_backend("simulated")
    torch._register_device_module("simulated", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    simulated_accelerator.register(library())
    atexit.register(_finish)


def _finish() -> None:
    """Let the streams end their work before the libraries that they use are torn down."""
    if library().simulated_initialized():
        for index in range(torch.accelerator.device_count()):
            if torch.accelerator.memory_reserved(index):
                torch.accelerator.synchronize(index)


def _module() -> ModuleType:
    """Return the module ``torch.simulated``, with the names of ``torch.cuda``."""
    module: Any = ModuleType("torch.simulated")
    paths = [Path(path) for path in os.environ[PATHS].split(":")]
    module.is_available = lambda: True
    module.is_initialized = lambda: bool(library().simulated_initialized())
    module._is_in_bad_fork = lambda: bool(library().simulated_forked())
    module._lazy_init = lambda: None
    module.device_count = lambda: len(paths)
    module.current_device = torch.accelerator.current_device_index
    module.device = lambda place: torch.accelerator.device_index(place.index or 0)
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.Stream = torch.Stream
    module.Event = lambda: torch.Event("simulated")
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream
    module.empty_cache = torch.accelerator.empty_cache
    module.memory_allocated = torch.accelerator.memory_allocated
    module.memory_reserved = torch.accelerator.memory_reserved
    module.memory_snapshot = snapshot
    module.get_allocator_backend = lambda: "native"
    module.get_device_properties = lambda place: SimpleNamespace(
        total_memory=open_file(paths[place.index or 0]).capacity
    )
    module.mem_get_info = lambda place: free_and_total(open_file(paths[place.index or 0]))
    module.memory_stats_as_nested_dict = lambda place: {
        "allocated_bytes": {
            "all": {
                "current": torch.accelerator.memory_allocated(place),
                "peak": torch.accelerator.max_memory_allocated(place),
            }
        }
    }
    module.manual_seed_all = library().simulated_seed
    module.get_rng_state_all = lambda: [random_state(index) for index in range(len(paths))]
    module.set_rng_state_all = lambda states: [*map(set_random_state, states, range(len(states)))]
    module.set_rng_state = set_random_state
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


GPU: Gpu
"""The GPU of the tests' process (device_process.py)."""
OPERATOR_NS = 2_000_000
"""Time of an operator that is slow enough for a missing wait to show."""


@contextlib.contextmanager
def occupied(gpu: Gpu, nbytes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Let another process have some of the GPU's memory."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        row = next(owner for owner in gpu.owners if not owner.pid)
        row.started, row.bytes, row.pid = started, nbytes, process.pid
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":  # simulated_gpu.py FILE BYTES: make a GPU for other processes
    create(Path(sys.argv[1]), int(sys.argv[2]), context_bytes=1 << 20)
