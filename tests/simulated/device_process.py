"""Process with a simulated GPU that runs tests by name: ``device_process.py FOLDER DESCRIPTOR`` (see conftest.py)."""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import simulated_gpu
import torch

from cadenza.sidecar import client

HERE = Path(__file__).resolve().parent
CAPACITY = 64 << 20
CONTEXT = 1 << 20
NORMAL = {"capacity": CAPACITY, "context_bytes": CONTEXT}


def prepare(gpu: simulated_gpu.Gpu) -> None:
    """Leave nothing of the test before: no fault, no error, no memory."""
    for name in [name for name, _ in simulated_gpu.Gpu._fields_ if name not in ("magic", "owners")]:
        setattr(gpu, name, NORMAL.get(name, 0))
    gc.collect()
    simulated_gpu.library().simulated_last_error()
    simulated_gpu.library().simulated_forget_errors()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()  # a peak of the test before would be what this one needs
    torch.manual_seed(4)


def run(test: dict[str, Any], gpu: simulated_gpu.Gpu) -> str:
    """Run a test; return the traceback of its failure, "" for success."""
    try:
        prepare(gpu)
        given = {name: Path(value) if name == "tmp_path" else value for name, value in test["given"].items()}
        getattr(importlib.import_module(test["module"]), test["name"])(**given)
    except BaseException:  # noqa: BLE001 - the other process reports it
        failure = traceback.format_exc()
        client.detach()  # else the next test would attach to this one's session
        return failure
    return ""


def main() -> None:
    """Answer each test with its failure, until the other end closes."""
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "gpu"), str(HERE.parent / "client")]
    torch.set_num_threads(1)
    channel = socket.socket(fileno=int(sys.argv[2]))
    path = Path(sys.argv[1]) / f"gpu-{os.getpid()}"
    gpu = simulated_gpu.create(path, **NORMAL)
    simulated_gpu.load([path])
    simulated_gpu.GPU = gpu
    with channel.makefile("rw") as tests:
        for line in tests:
            tests.write(json.dumps(run(json.loads(line), gpu)) + "\n")
            tests.flush()


if __name__ == "__main__":
    main()
