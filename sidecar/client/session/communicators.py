"""NCCL's communicators while the job is away: their GPU memory is given back by all ranks together, or by none."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import RestoreError

BACKENDS = {"nccl": "cuda"}
"""Process group backends that can be suspended, and the type of their devices (``Backend.suspend``, torch 2.12)."""
MIN_NCCL = (2, 29, 7)
"""The first NCCL with ncclCommSuspend."""
KEEP = "CADENZA_SUSPEND_NCCL"
"""Environment variable that keeps the communicators on the GPU with the value 0."""
SHARE = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
"""With it communicators share memory: NCCL refuses to suspend some ranks of a group, and others wait for them."""
AGREE_NS = 10_000_000_000
"""Longest wait for the other ranks; one that has lost its agent, or cannot yield, does not come."""
RESUME_TRIES = 120
POLL_S, RETRY_S = 0.005, 0.5
"""Seconds between two looks for the other ranks, and between two attempts to take memory of a GPU that is full."""
YES, NO = "yes", "no"
IDLE = "communicator not initialized"
"""Text of torch's error for a group that has communicated nothing yet, and so has no memory."""

_log = logging.getLogger("cadenza.client")
_pause = threading.Event()


class Communicators:
    """The communicators of this process."""

    def __init__(self) -> None:
        self._suspended: list[Any] = []

    def suspend(self, stop: str) -> None:
        """Give the memory back if all ranks come here in time for the same ``stop``; else no rank does.

        Suspending waits inside NCCL for all ranks of a group, without a limit. So the ranks agree before, in the
        store in which their process groups have met: the first word on a verdict there is the last.
        """
        module = sys.modules.get("torch.distributed.distributed_c10d")
        try:
            backends = _backends(module) if module is not None else []
            agreed = bool(backends) and _agreed(module, f"cadenza/suspend/{stop}")
        except Exception as error:  # noqa: BLE001 - torch's private names, and a store whose process may be gone
            _log.warning("NCCL keeps its GPU memory: %s: %s", type(error).__name__, error)
            return
        if not agreed:
            return
        for backend in backends:
            try:
                backend.suspend()
                self._suspended.append(backend)
            except RuntimeError as error:
                if IDLE not in str(error):
                    _log.warning("a communicator keeps its GPU memory: %s", error)

    def resume(self) -> None:
        """Take the memory again and wait for the other ranks; raise RestoreError if the GPU has none."""
        while self._suspended:
            for tries in range(RESUME_TRIES + 1):
                try:
                    self._suspended[0].resume()
                    break
                except RuntimeError as error:
                    if tries == RESUME_TRIES:
                        raise RestoreError(f"NCCL's memory cannot come back: {error}") from None
                    _log.warning("NCCL's memory cannot come back yet: %s", error)
                    _pause.wait(RETRY_S)
            del self._suspended[0]


def _backends(module: Any) -> list[Any]:
    """Return the backends of this process that can be suspended, in the order in which all ranks made their groups."""
    if os.environ.get(KEEP) == "0" or os.environ.get(SHARE, "0") != "0":
        return []
    torch = sys.modules["torch"]
    found = []
    for group, (names, _) in module._world.pg_map.items():  # noqa: SLF001
        for name, kind in BACKENDS.items():
            if name in names:
                backend = group._get_backend(torch.device(kind))  # noqa: SLF001
                if hasattr(backend, "suspend") and (kind != "cuda" or torch.cuda.nccl.version() >= MIN_NCCL):
                    found.append(backend)
    return found


def _agreed(module: Any, key: str) -> bool:
    """Return whether all ranks have come here; each of them hears the same."""
    store, deadline = module._get_default_store(), monotonic_ns() + AGREE_NS  # noqa: SLF001
    verdict = f"{key}/verdict"
    if store.add(f"{key}/ready", 1) == module.get_world_size():
        store.compare_set(verdict, "", YES)
    while not store.check([verdict]) and monotonic_ns() < deadline:
        _pause.wait(POLL_S)
    agreed = bool(store.compare_set(verdict, "", NO) == YES.encode())
    if not agreed:
        _log.warning("NCCL keeps its GPU memory: not all ranks came to suspend it within %d s", AGREE_NS // 10**9)
    return agreed
