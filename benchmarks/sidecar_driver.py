#!/usr/bin/env python3
"""Measure the driver path: lock, checkpoint, restore, unlock of a process with 1, 10 and 40 GB, content compared.

Each row is compared with one large pinned copy that the same process made before. Needs a GPU, driver 570 or later, the
extra `driver` and the rights to checkpoint another process (root); otherwise it says "not run" and why.
Exit status 1 when content differs or a process keeps GPU memory while it is checkpointed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.driver.cuda import Cuda, CudaError

GB = 1 << 30
SIZES_GB = (1, 10, 40)
LOCK_MS = 10_000
HOLDER = """
import sys, time, torch
size = int(sys.argv[1])
state = torch.empty(size // 4, dtype=torch.int32, device="cuda").random_()
host = torch.empty(min(size, 4 << 30) // 4, dtype=torch.int32, pin_memory=True)
host.copy_(state[: host.numel()])
torch.cuda.synchronize()
began = time.monotonic()
host.copy_(state[: host.numel()], non_blocking=True)
torch.cuda.synchronize()
speed = host.numel() * 4 / (time.monotonic() - began)
del host
before = int(state.sum(dtype=torch.int64))
print(speed, flush=True)
sys.stdin.readline()
print(int(state.sum(dtype=torch.int64)) == before, flush=True)
"""
Row = dict[str, Any]


def timed(call: Callable[..., object], *arguments: object) -> float:
    """Return how long a call took, in seconds."""
    began = time.monotonic()
    call(*arguments)
    return time.monotonic() - began


def free_bytes() -> int:
    """Return the free memory of GPU 0, by NVML: it opens no context."""
    import pynvml  # noqa: PLC0415 - only where there is a GPU

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)


def measured(cuda: Cuda, size: int, unused: int) -> Row:
    """Return one row: seconds of each operation and the speed against that of one pinned copy."""
    command = [sys.executable, "-c", HOLDER, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            return _measured(cuda, holder, size, unused)
        finally:
            holder.kill()


def _measured(cuda: Cuda, holder: subprocess.Popen[str], size: int, unused: int) -> Row:
    if holder.stdin is None or holder.stdout is None:
        raise RuntimeError("the process that holds memory has no pipes")
    peer = float(holder.stdout.readline())
    seconds = {"lock_s": timed(cuda.lock, holder.pid, LOCK_MS)}
    seconds["checkpoint_s"] = timed(cuda.checkpoint, holder.pid)
    kept = unused - free_bytes()
    seconds["restore_s"] = timed(cuda.restore, holder.pid)
    seconds["unlock_s"] = timed(cuda.unlock, holder.pid)
    holder.stdin.write("\n")
    holder.stdin.flush()
    same = holder.stdout.readline().strip() == "True"
    out, back = size / seconds["checkpoint_s"], size / seconds["restore_s"]
    return {
        "gb": size / GB, **seconds, "out_gb_s": out / 1e9, "back_gb_s": back / 1e9, "pinned_copy_gb_s": peer / 1e9,
        "out_ratio": out / peer, "back_ratio": back / peer, "kept_mb": kept >> 20, "same": same,
    }  # fmt: skip


def run(sizes: list[int]) -> Row:
    """Return all rows, and what was not run."""
    try:
        cuda = Cuda()
    except EnvironmentLacks as error:
        return {"rows": [], "not_run": [f"everything: {error}"]}
    unused = free_bytes()
    rows, missing = [], []
    for size in sizes:
        if size * 1.1 > unused:
            missing.append(f"{size // GB} GB: the GPU has {unused // GB} GB free")
            continue
        try:
            rows.append(measured(cuda, size, unused))
        except (CudaError, ValueError) as error:
            missing.append(f"{size // GB} GB: {error}")
    return {"rows": rows, "not_run": missing}


def main() -> int:
    """Print the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=int, nargs="+", default=list(SIZES_GB), help="sizes of the state")
    result = run([size * GB for size in parser.parse_args().gb])
    for row in result["rows"]:
        print("  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in row.items()))  # fmt: skip
    for line in result["not_run"]:
        print(f"not run: {line}")
    print(json.dumps(result))
    return int(any(not row["same"] or row["kept_mb"] > 1 for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
