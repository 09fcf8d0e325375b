#!/usr/bin/env python3
"""Train on images that are stored compressed: reading, decoding and augmenting them takes the CPUs' time.

    cadenza profile run -- python images.py --data DIR

Loader workers follow the job's CPUs and the cache its memory, in place. Without a GPU a step takes at least
``--device-ms``, as if one computed then; ``--storage-mb-s`` stands for storage that is slower than this machine's.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import time  # noqa: TID251 (a training script of a user, not part of the packages)
import zlib
from pathlib import Path

import numpy as np
import torch
from pace import DEVICE, Device, forever, step
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler

from cadenza.sidecar import client
from cadenza.sidecar.client.data import CachedDataset, ElasticDataLoader

SIDE = 352
"""Pixels of a stored image's side."""
CROP = 320
BATCH = 32
IMAGES = 256
PASSES = 64
"""Times that the loader goes over all images before it begins anew; a short epoch would drain it each time."""


class Stored(Dataset[tuple[bytes, int]]):
    """Images in files of their own, as they are stored; made at the first use."""

    def __init__(self, folder: Path, mb_s: float) -> None:
        self._lock = folder / "lock"
        self._mb_s = mb_s
        self._paths = [folder / f"{index:04}.z" for index in range(IMAGES)]
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        for path in self._paths:
            if not path.exists():
                coarse = random.integers(0, 256, (SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
                path.write_bytes(zlib.compress(coarse.repeat(4, axis=0).repeat(4, axis=1).tobytes(), 1))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """Read an image, from one storage for all workers if it is to have a bandwidth."""
        found = self._paths[index].read_bytes()
        if self._mb_s:
            with self._lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                time.sleep(len(found) / 2**20 / self._mb_s)
        return found, index % 10


def one_each(cpus: float) -> int:
    """Return a loader worker for each CPU, also for a part of one: on a GPU the training thread needs next to none."""
    return math.ceil(cpus)


def augmented(item: tuple[bytes, int]) -> tuple[Tensor, int]:
    """Return an image: decoded, cropped, flipped, scaled and normalized."""
    pixels = np.frombuffer(zlib.decompress(item[0]), dtype=np.uint8)
    image = torch.from_numpy(pixels.copy()).view(SIDE, SIDE, 3).permute(2, 0, 1).float()
    top, left = torch.randint(SIDE - CROP, (2,)).tolist()
    image = image[:, top : top + CROP, left : left + CROP]
    if torch.rand(()) < 1 / 2:
        image = image.flip(2)
    image = nn.functional.interpolate(image[None], 224, mode="bicubic", antialias=True)[0]
    return (image - image.mean()) / image.std(), item[1]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("images"), help="folder of the images")
    parser.add_argument("--device-ms", type=float, default=40.0, help="least time of a step without a GPU")
    parser.add_argument("--busy", type=float, default=1.0, help="part of it in which the stand-in for a GPU computes")
    parser.add_argument("--cache-mb", type=int, default=64, help="cache before anybody says how much the job may have")
    parser.add_argument("--storage-mb-s", type=float, default=0.0, help="bandwidth of the storage; 0: as it is")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--iterations", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.Conv2d(8, 16, 4, stride=4), nn.Flatten(), nn.Linear(784, 10)
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = client.attach(model, optimizer)
    stored = Stored(options.data, options.storage_mb_s)
    images = CachedDataset(stored, options.cache_mb << 20, transform=augmented)
    order = RandomSampler(images, num_samples=PASSES * IMAGES)
    loader = ElasticDataLoader(images, options.batch, sampler=order, workers=one_each, persistent_workers=True)
    for _, batch in zip(range(options.iterations), forever(loader), strict=False):
        step(model, optimizer, batch, Device(options.device_ms / 1000, options.busy))
        session.boundary(len(batch[0]))


if __name__ == "__main__":
    main()
