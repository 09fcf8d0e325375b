#!/usr/bin/env python3
"""Print how fast checkpoints are saved and restored, against torch.save, torch.load and a raw write of as many bytes.

All in one run, on one file system (``--directory``), in turns; medians over ``--repeat`` rounds. The peers are made
as durable as ours: a new file, fsync, and the one before the last goes. ``torch.load`` is followed by
``load_state_dict``, as restoring is. ``--gb`` is the size of the state, half of it the model, half its optimizer's
momentum. With CUDA the state is on the GPU unless ``--device cpu`` is given. Exits with 1 when below a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cadenza.sidecar.client.checkpoints import Checkpoint, checkpoint

SAVE_LIMIT, RESTORE_LIMIT = 0.8, 0.5
"""Our throughput as a share of the peer's, below which this exits with 1; restoring reads the file a second time, to
check it, which torch.load does not."""
LAYERS = 16
KEPT = 2


class Bench:
    """One state, and the ways to write and read it."""

    def __init__(self, folder: Path, nbytes: int, device: str) -> None:
        self.folder, self.device = folder, device
        width = int((nbytes / 2 / 4 / LAYERS) ** 0.5)
        layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.nbytes = 2 * LAYERS * width * width * 4
        self.step = self.serial = 0
        self.files: dict[str, list[Path]] = {}
        self.raw = torch.ones(self.nbytes, dtype=torch.uint8).numpy()
        self.ours = self.keeper(background=False)
        self.behind = self.keeper(background=True)

    def keeper(self, *, background: bool) -> Checkpoint:
        """Return a checkpoint of this state in a directory of its own."""
        place = self.folder / f"background-{background}"
        return checkpoint(place, model=self.model, optimizer=self.optimizer, background=background)

    def write_raw(self) -> None:
        """Write as many bytes in one piece."""
        with self.fresh("raw").open("wb", buffering=0) as file:
            view, done = memoryview(self.raw), 0
            while done < len(view):
                done += file.write(view[done:])
            os.fsync(file.fileno())
        self.drop("raw")

    def torch_save(self) -> None:
        """Save as scripts do, and sync."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with self.fresh("plain.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self.drop("plain.pt")

    def torch_load(self) -> None:
        """Load as scripts do."""
        state = torch.load(self.files["plain.pt"][-1], weights_only=True, map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.synchronize()

    def save(self) -> None:
        """Save ours."""
        self.step += 1
        self.ours.save(self.step)

    def save_behind(self) -> None:
        """Start ours in the background: what the training waits for."""
        self.step += 1
        self.behind.save(self.step)

    def restore(self) -> None:
        """Restore ours, with all its checks."""
        if self.ours.restore() is None:
            raise SystemExit("nothing was restored")
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def fresh(self, name: str) -> Path:
        """Return the path of a new file."""
        before = self.files.setdefault(name, [])
        self.serial += 1
        before.append(self.folder / f"{name}.{self.serial}")
        return before[-1]

    def drop(self, name: str) -> None:
        """Remove all but the newest two, as ours does at the end of a save."""
        while len(self.files[name]) > KEPT:
            self.files[name].pop(0).unlink()


def measure(bench: Bench, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each way; each round begins with another one, and the first is not counted."""
    ways: dict[str, Callable[[], None]] = {
        "raw write + fsync": bench.write_raw,
        "torch.save + fsync": bench.torch_save,
        "save": bench.save,
        "torch.load": bench.torch_load,
        "restore": bench.restore,
        "save, background": bench.save_behind,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        names = list(ways) if turn == 0 else [*list(ways)[turn % len(ways) :], *list(ways)[: turn % len(ways)]]
        for name in names:
            os.sync()
            started = time.perf_counter()
            ways[name]()
            if turn:
                seconds[name].append(time.perf_counter() - started)
            bench.behind.wait()
    return seconds


def summary(bench: Bench, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, throughputs and ratios to the peers."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "device": torch.cuda.get_device_name() if bench.device != "cpu" else "cpu",
        "bytes": bench.nbytes,
        "seconds": seconds,
        "gb_s": {name: bench.nbytes / 1e9 / value for name, value in medians.items()},
        "save_to_torch_save": ratio(seconds["torch.save + fsync"], seconds["save"]),
        "save_to_raw": ratio(seconds["raw write + fsync"], seconds["save"]),
        "restore_to_torch_load": ratio(seconds["torch.load"], seconds["restore"]),
        "limits": {"save": SAVE_LIMIT, "restore": RESTORE_LIMIT},
    }


def ratio(peer: list[float], ours: list[float]) -> float:
    """Return our throughput as a share of the peer's: the median over rounds, in which both met the same load."""
    return statistics.median(a / b for a, b in zip(peer, ours, strict=True))


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"state of {found['bytes'] / 1e9:.2f} GB on {found['device']}, medians of {len(found['seconds']['save'])}")
    for name, rate in found["gb_s"].items():
        print(f"{name:20s} {statistics.median(found['seconds'][name]):8.3f} s {rate:8.2f} GB/s")
    print(f"save against torch.save + fsync: {found['save_to_torch_save']:.2f} of its throughput, limit {SAVE_LIMIT}")
    print(f"save against a raw write + fsync: {found['save_to_raw']:.2f} of its throughput")
    print(f"restore against torch.load: {found['restore_to_torch_load']:.2f} of its throughput, limit {RESTORE_LIMIT}")
    if found["device"] == "cpu":
        print("state on a GPU: not run")


def main() -> int:
    """Measure and print; 1 when below a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary directory unless given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="cadenza-checkpoint-", dir=arguments.directory))
    try:
        bench = Bench(folder, int(arguments.gb * 1e9), arguments.device)
        found = summary(bench, measure(bench, arguments.repeat))
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)
    return int(found["save_to_torch_save"] < SAVE_LIMIT or found["restore_to_torch_load"] < RESTORE_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
