"""The rows of ``acceptance.py``: their processes, and how each prints its outcome as a JSON line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Figures = dict[str, Any]
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
ENGINE = ("sidecar/client/offload", "benchmarks/gpu/checks.py", "benchmarks/gpu/offload_jobs.py")
AGENT = ("sidecar", "benchmarks/gpu/alternation.py")
DRIVER = ("sidecar/agent/driver", "benchmarks/gpu/features.py", "benchmarks/gpu/checks.py")
ADDRESSES = ("sidecar/client/offload", "sidecar/agent/addresses", "benchmarks/gpu/addresses.py")
RANKS = ("sidecar", "benchmarks/gpu/ranks.py", "benchmarks/gpu/alternation.py")


@dataclass(frozen=True)
class Unit:
    """One process, and the rows that it prints as they end: one, or several that look at the same run."""

    script: str
    rows: tuple[str, ...]
    limit_s: float
    """Longest time of the process in seconds."""
    files: tuple[str, ...]
    """Paths whose change makes a row that has passed unknown again."""
    alone: bool = False
    """It measures time, or takes the whole GPU: nothing else runs with it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment of its process."""
    gpus: int = 1
    """GPUs that it takes."""


def _checks(limit_s: float, *rows: str, files: tuple[str, ...] = ENGINE, alone: bool = False) -> list[Unit]:
    return [Unit("checks.py", (row,), limit_s, files, alone) for row in rows]


def _features(
    limit_s: float, *rows: str, files: tuple[str, ...] = ENGINE, alone: bool = False, allocator: str = ""
) -> list[Unit]:
    settings = {ALLOCATOR: allocator} if allocator else {}
    return [Unit("features.py", (row,), limit_s, (*files, "benchmarks/gpu/features.py"), alone, settings)
            for row in rows]  # fmt: skip


SPEEDS = {
    "cuda": ((1024, 65536, 16, 0.8), (10240, 65536, 160, 0.9), (40960, 65536, 640, 0.9), (65536, 65536, 1024, 0.9),
             (280, 128, 2240, 0.5), (6144, 512, 12288, 0.5), (8192, 128, 65536, 0.5)),
    "simulated": ((24, 4096, 6, 0.05), (8, 64, 128, 0.01)),
}  # fmt: skip
"""MiB of state, KiB and number of its tensors, and the least share of a plain pinned copy's speed, the survey included.

2,240 tensors of 128 KiB are those of LoRA of rank 16 on 7 billion parameters, 12,288 of 512 KiB those of 64 experts in
16 layers; the last are 8 GiB in LoRA's size.
"""


def speed_row(mib: int, kib: int) -> str:
    """Return the name of a row."""
    return f"B speed of {mib} MiB in tensors of {kib} KiB"


WORLDS = (2, 8)
RANK_KINDS = ("DDP", "FSDP2", "DDP and a second group")


def rank_row(kind: str, world: int) -> str:
    """Return the name of a row."""
    return f"R {kind} with {world} ranks in turns under an agent"


def units(kind: str, *, long: bool) -> list[Unit]:
    """Return all processes, for a type of GPU; with ``long`` the two jobs take turns of 60 s."""
    found = _units(kind, turns_s=1800.0 if long else 100.0)
    return _joined(found) if kind == "simulated" else found


def _joined(separate: list[Unit]) -> list[Unit]:
    """Return units with those joined that differ in their rows alone: there starting torch takes longer than a row."""
    alike: dict[tuple[Any, ...], list[Unit]] = {}
    for unit in separate:
        key = (unit.script, unit.files, unit.alone, *sorted(unit.settings.items()), unit.gpus)
        alike.setdefault(key, []).append(unit)
    return [
        replace(same[0], rows=tuple(row for one in same for row in one.rows), limit_s=sum(one.limit_s for one in same))
        for same in alike.values()
    ]


def _units(kind: str, *, turns_s: float) -> list[Unit]:
    return [
        *_checks(40, "A the link", *(speed_row(mib, kib) for mib, kib, _, _ in SPEEDS[kind]), alone=True),
        *_checks(
            40,
            "B the GPU is free after a yield", "B cycle after cycle keeps nothing",
            "C unregistered memory is counted", "C unregistered memory above the limit refuses",
            "C a CUDA graph and a pool refuse by name", "H a checkpoint while the state is away",
            "H interrupts in the copy", "H a refused registration spoils no kernel",
        ),
        *_checks(90, "C training that yields is bit-identical", "C torch's optimizers compute the same"),
        *_checks(40, "H a full GPU at the resume", alone=True),
        *_checks(60, "F process checkpoint by the driver", files=DRIVER, alone=True),
        *_checks(40, "F mappings of managed memory", files=DRIVER),
        *_checks(40, "G the agent's figures are those of torch", files=("sidecar/agent/telemetry",), alone=True),
        *_features(
            60, "C torch.compile computes the same", "C memory of a side stream comes back on it",
            "C torch.compile's CUDA graphs refuse by name", "C a graph behind gc.freeze() refuses",
            "H host memory that is short refuses",
        ),
        *_features(60, "C DDP and FSDP with one rank", files=(*ENGINE, "sidecar/client/session/communicators.py")),
        *_features(60, "C expandable segments leave the GPU", allocator="expandable_segments:True"),
        *_features(40, "C cudaMallocAsync refuses by name", allocator="backend:cudaMallocAsync"),
        *_features(60, "C addresses that stay: CUDA graphs, 50 yields", files=ADDRESSES),
        *_features(90, "C addresses that stay: fused AdamW, DDP, reduce-overhead", files=ADDRESSES),
        *_features(
            100, "B addresses that stay: 512 segments of 2 MiB", "B addresses that stay: 40 GiB",
            files=ADDRESSES, alone=True,
        ),
        *_features(120, "D a large language model", alone=True),
        *_features(90, "F the driver's trial of doctor --gpu", files=DRIVER, alone=True),
        *_features(40, "F NCCL's watchdog keeps a process from freezing", files=DRIVER),
        *_features(60, "H a process killed in its copies", alone=True),
        Unit("peers.py", ("P the same state by Cadenza, the driver and torch_memory_saver",), 120,
             (*ENGINE, "benchmarks/gpu/peers.py"), alone=True),
        Unit("peers.py", ("P packing of three pairs of processes",), 60, ("benchmarks/gpu/peers.py",), alone=True),
        Unit("alternation.py", ("E two processes alternate on one GPU", "E both compute what they compute alone",
                                    "E the GPU is free of the one that waits", "E seconds from one job to the other",
                                    "E overhead of the client an iteration"), turns_s, AGENT, alone=True),
        Unit("alternation.py", ("F two scripts without Cadenza alternate",
                                    "F both scripts compute what they compute alone"), turns_s, AGENT, alone=True),
        *(Unit("ranks.py", (rank_row(one, world),), 150, RANKS, alone=True, gpus=world)
          for world in WORLDS for one in RANK_KINDS),
        Unit("ranks.py", ("R NCCL's memory is given back and comes back",), 60, RANKS, alone=True, gpus=2),
        Unit("ranks.py", ("R all GPUs move their state at once",), 90, ENGINE, alone=True, gpus=2),
    ]  # fmt: skip


class MissedError(Exception):
    """A limit of a check is missed."""


class NotRunError(Exception):
    """A check cannot run on this machine; the text says why."""


def require(condition: object, text: str) -> None:
    """Raise MissedError unless a condition holds."""
    if not condition:
        raise MissedError(text)


def tell(**message: Any) -> None:
    """Print one message to acceptance.py."""
    print(json.dumps(message), flush=True)


def check(name: str, look: Callable[[Figures], None]) -> None:
    """Run a check, which writes its figures down, and print its row."""
    figures: Figures = {}
    outcome, why, began = "passed", "", time.monotonic()
    try:
        look(figures)
    except NotRunError as error:
        outcome, why = "not run", str(error)
    except MissedError as error:
        outcome, why = "FAILED", str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the row names it, and the next check runs
        outcome, why = "FAILED", f"{type(error).__name__}: {error}"[:300]
    tell(name=name, outcome=outcome, why=why, figures=figures, seconds=time.monotonic() - began)
