#!/usr/bin/env python3
"""Measure ElasticDataLoader against torch's DataLoader, a resize in mid-epoch, and the cache against its dataset.

The exit code is 1 unless every ratio keeps its limit.

Loaders take turns, epoch by epoch, so that both see the same machine; a ratio is the median over pairs of epochs.
Items are stored as zlib-compressed files, which stand for images that must be read and decoded.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.data import CachedDataset, ElasticDataLoader

LIMIT = 0.97
"""Least part of DataLoader's throughput for items that must be read; ready ones show the price of a batch alone."""
BATCH = 32
READY = "ready items"
SHAPE = (3, 96, 96)
STEP_S = 0.02
"""Seconds of training for a batch where pauses are measured."""


class Ready(Dataset[torch.Tensor]):
    """Items that are there already: what is measured is the loader."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.item = torch.zeros(SHAPE, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.item


class Stored(Dataset[torch.Tensor]):
    """Items in compressed files, unpacked and normalized when they are read."""

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self.length = folder, length
        generator = torch.Generator().manual_seed(0)
        for index in range(length):
            pixels = torch.randint(0, 64, SHAPE, dtype=torch.uint8, generator=generator)
            (folder / str(index)).write_bytes(zlib.compress(pixels.numpy().tobytes(), 6))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        raw = bytearray(zlib.decompress((self.folder / str(index)).read_bytes()))
        pixels = torch.frombuffer(raw, dtype=torch.uint8).view(SHAPE).float()
        return (pixels - pixels.mean()) / pixels.std()


def seconds(batches: Iterable[Any]) -> float:
    """Return how long it takes to go through."""
    started = monotonic_ns()
    for _ in batches:
        pass
    return (monotonic_ns() - started) / 1e9


def throughput(dataset: Dataset[Any], workers: int, rounds: int) -> dict[str, float]:
    """Return samples a second of both loaders, the median and quartiles of our throughput over torch's, and the price.

    The price is what a batch takes longer, in microseconds. Workers persist and are there before the first measured
    epoch; which loader begins a pair alternates.
    """
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    loaders: list[DataLoader[Any]] = [DataLoader(dataset, **options), ElasticDataLoader(dataset, **options)]
    spent: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            took = seconds(loaders[which])
            if turn:
                spent[which].append(took)
    low, middle, high = statistics.quantiles([torchs / ours for torchs, ours in zip(*spent, strict=True)])
    length = len(dataset)  # type: ignore[arg-type]
    rates = [length / statistics.median(times) for times in spent]
    price = statistics.median([ours - torchs for torchs, ours in zip(*spent, strict=True)]) / length * BATCH * 1e6
    return {"torch": rates[0], "elastic": rates[1], "ratio": middle, "low": low, "high": high, "price_us": price}


def waits_ms(batches: Iterator[Any], loader: ElasticDataLoader[Any], plan: dict[int, int]) -> list[float]:
    """Return the wait for each batch of a training with steps of STEP_S, resized as the plan says."""
    pause = torch.multiprocessing.get_context().Event()
    found = []
    for number in range(len(loader)):
        if number in plan:
            loader.resize(plan[number])
        started = monotonic_ns()
        next(batches)
        found.append((monotonic_ns() - started) / 1e6)
        pause.wait(STEP_S)
    return found


def resizing(dataset: Dataset[Any], rounds: int) -> dict[str, float]:
    """Return the pause at a resize 1 → 4 → 2: by how much the longest wait exceeds one without a resize.

    A resize may make two waits longer: where the new workers start, and where the last of the old ones end.
    Also: the time that a new DataLoader of as many workers takes to its first batch.
    """
    plan = {12: 4, 30: 2}
    pauses: list[float] = []
    usual: list[float] = []
    for _ in range(rounds):
        loader: ElasticDataLoader[Any] = ElasticDataLoader(dataset, 8, num_workers=1)
        waits = waits_ms(iter(loader), loader, plan)
        usual.append(statistics.median(waits))
        pauses += [max(waits[at : at + 15]) - usual[-1] for at in plan]
    fresh = []
    for _ in range(rounds):
        started = monotonic_ns()
        batches = iter(DataLoader(dataset, 8, num_workers=4))
        next(batches)
        fresh.append((monotonic_ns() - started) / 1e6)
        del batches
    return {
        "usual_ms": statistics.median(usual),
        "pause_ms": statistics.median(pauses),
        "worst_ms": max(pauses),
        "restart_ms": statistics.median(fresh),
    }


def caching(dataset: Dataset[Any], rounds: int) -> dict[str, float]:
    """Return microseconds an item without a cache, when it is filled and when it answers; and a half budget's hits."""
    length = len(dataset)  # type: ignore[arg-type]
    each = torch.zeros(SHAPE).nbytes + 4096
    plain, fills, hits = [], [], []
    for turn in range(rounds):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
            cache = CachedDataset(dataset, length * each, shared, name=str(turn))
            plain.append(seconds(dataset[index] for index in range(length)))
            fills.append(seconds(cache[index] for index in range(length)))
            hits.append(seconds(cache[index] for index in range(length)))
            full = cache.stats().used
            cache.resize(0)
            cache.resize(full // 2)
            loader: ElasticDataLoader[Any] = ElasticDataLoader(cache, 16, shuffle=True, num_workers=2)
            seconds(loader)
            before = cache.stats()
            seconds(loader)
            rate = cache.stats().since(before).hit_rate
            cache.close()
    uncached, filling, cached = (statistics.median(times) / length * 1e6 for times in (plain, fills, hits))
    return {"uncached_us": uncached, "filling_us": filling, "cached_us": cached, "half_budget_hit_rate": rate}


def measure(rounds: int) -> dict[str, Any]:
    """Return all measurements."""
    with tempfile.TemporaryDirectory() as folder:
        stored = Stored(Path(folder), 400)
        rates = {
            f"{name}, {workers} workers": throughput(dataset, workers, rounds)
            for name, dataset in ((READY, Ready(4000)), ("stored items", stored))
            for workers in (0, 1, 2)
        }
        return {
            "machine": f"{platform.machine()}, torch {torch.__version__}",
            "limit": LIMIT,
            "throughput": rates,
            "resize": resizing(stored, max(3, rounds // 8)),
            "cache": caching(stored, max(3, rounds // 8)),
        }


def show(found: dict[str, Any]) -> None:
    """Print a table."""
    head = f"{'samples a second':26}{'DataLoader':>12}{'Elastic':>10}{'ratio':>8}"
    print(f"{head}  quartiles       µs a batch  limit {LIMIT}")
    for name, row in found["throughput"].items():
        verdict = "-" if name.startswith(READY) else "met" if row["ratio"] >= LIMIT else "MISSED"
        print(
            f"{name:26}{row['torch']:12.0f}{row['elastic']:10.0f}{row['ratio']:8.3f}"
            f"  {row['low']:.3f} to {row['high']:.3f}  {row['price_us']:+10.0f}  {verdict}"
        )
    print("\nresize 1 → 4 → 2 in mid-epoch, ms: wait {usual_ms:.2f} as usual,".format(**found["resize"]), end=" ")
    print("pause {pause_ms:.1f} (at worst {worst_ms:.1f});".format(**found["resize"]), end=" ")
    print("a new DataLoader's first batch takes {restart_ms:.1f}".format(**found["resize"]))
    print("cache, µs an item: {uncached_us:.0f} without,".format(**found["cache"]), end=" ")
    print("{filling_us:.0f} when filled, {cached_us:.0f} when read;".format(**found["cache"]), end=" ")
    print("hit rate at half the budget {half_budget_hit_rate:.3f}".format(**found["cache"]))
    print("not run: pinned memory, which needs a GPU")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of epochs for each ratio")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    found = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    ratios = [row["ratio"] for name, row in found["throughput"].items() if not name.startswith(READY)]
    sys.exit(any(ratio < LIMIT for ratio in ratios))


if __name__ == "__main__":
    main()
