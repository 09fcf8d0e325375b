"""A process with known state on a GPU, which moves it by words on standard input: the trial of the offload engine.

``python -m cadenza.sidecar.client.bootstrap.offload_trial`` answers each word of ``WORDS`` by a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from cadenza.sidecar.client.errors import ClientError, MoveError
from cadenza.sidecar.client.offload import device
from cadenza.sidecar.client.offload.device import Accelerator
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import Segment, survey

WORDS = ("use", "fill", "out", "back", "compare")
MAX_STATE_BYTES = 1 << 30
STATE_SHARE = 8
"""The state takes one part in so many of the GPU's memory, and at most that many bytes."""
BLOCK_BYTES = 4 << 20
"""Bytes of one of its large tensors."""


def random_tensors(place: torch.device, nbytes: int, block_bytes: int, seed: int) -> list[torch.Tensor]:
    """Return tensors of random content on a device: of ``nbytes`` bytes in blocks, and a few small ones."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 255, (min(block_bytes, nbytes),), dtype=torch.uint8, generator=generator)
    small = [block[: 104 * (number + 1)].roll(number).to(place) for number in range(20)]
    return [block.to(place).add_(number) for number in range(nbytes // block.nbytes)] + small


def segments_of(tensors: Sequence[torch.Tensor]) -> tuple[Segment, ...]:
    """Return the storages of tensors; raise MoveError unless all of them can move."""
    plan = survey([("tensors", list(tensors))])
    if plan.refusal or plan.resident:
        raise MoveError(plan.refusal or f"stays: {', '.join(map(str, plan.resident))}")
    return plan.segments


def use(accelerator: Accelerator, place: torch.device) -> None:
    """Multiply two matrices on a device, so that this process has its context and libraries there."""
    ones = torch.ones(64, 64, device=place)
    (ones @ ones).sum().item()
    del ones
    accelerator.empty_cache()


class Subject:
    """The process on the GPU."""

    def __init__(self) -> None:
        self._offload = Offload()
        self._place = torch.device("cpu")
        self._tensors: list[torch.Tensor] = []
        self._content: list[torch.Tensor] = []

    def obey(self, word: str) -> dict[str, Any]:
        """Return the answer to a word: figures, or the reason of a failure."""
        try:
            answer: dict[str, Any] = getattr(self, f"_{word}")() if word in WORDS else {"failed": "no such word"}
        except (ClientError, RuntimeError, MemoryError) as error:
            return {"failed": f"{word}: {error}"}
        return answer

    def _use(self) -> dict[str, Any]:
        found = next((one for one in device.ACCELERATORS.values() if one.module.is_available()), None)
        if found is None:
            return {"not_run": f"torch {torch.__version__} finds no GPU"}
        self._place = found.devices()[0]
        use(found, self._place)
        return {"torch": torch.__version__}

    def _fill(self) -> dict[str, Any]:
        nbytes = min(MAX_STATE_BYTES, device.ACCELERATORS[self._place.type].total(self._place) // STATE_SHARE)
        self._tensors = random_tensors(self._place, nbytes, BLOCK_BYTES, seed=os.getpid())
        self._content = [tensor.cpu() for tensor in self._tensors]
        return {"bytes": nbytes}

    def _out(self) -> dict[str, Any]:
        segments = segments_of(self._tensors)
        if refusal := self._offload.memory_refusal(segments, 1):
            return {"not_run": refusal}
        moved = self._offload.offload(segments)
        pinned = self._offload.pinned_bytes >= moved.nbytes
        return {"seconds": moved.seconds, "left": moved.left, "pinned": pinned}

    def _back(self) -> dict[str, Any]:
        return {"seconds": self._offload.restore().seconds}

    def _compare(self) -> dict[str, Any]:
        same = all(torch.equal(now.cpu(), then) for now, then in zip(self._tensors, self._content))
        return {} if same else {"failed": "the content differs"}


if __name__ == "__main__":
    subject = Subject()
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(subject.obey(line.strip()))}\n")
        sys.stdout.flush()
