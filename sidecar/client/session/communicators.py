"""NCCL's communicators while the job is away: their GPU memory is given back by all ranks together, or by none."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any, NamedTuple

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
PENDING_NS = 5_000_000_000
"""Longest wait for a communicator whose ``suspend`` has ended, and which is not suspended yet."""
YES, NO = "yes", "no"
IDLE = "communicator not initialized"
"""Text of torch's error for a group that has communicated nothing yet, and so has no memory."""
UNTOUCHED = ("ncclInvalidUsage", "ncclInvalidArgument")
"""Errors that NCCL returns before it has touched anything, such as without its memory manager."""
NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
"""With it NCCL's calls return before they are done, as with ``options.config.blocking = 0``."""
TRUE = frozenset({"1", "y", "yes", "t", "true"})
"""Values by which torch takes an environment variable for set, in lower case."""

_log = logging.getLogger("cadenza.client")
_pause = threading.Event()


class Suspended(NamedTuple):
    """A communicator that is suspended, or may be: then ``doubt`` is the reason why that cannot be told."""

    backend: Any
    doubt: str


class Communicators:
    """The communicators of this process."""

    def __init__(self, session: int) -> None:
        """``session`` is a number that each session of this process has once: the next one's steps begin anew."""
        self.freed: dict[int, int] = {}
        """GPU memory that the suspended communicators take back at their resume, by the index of the GPU."""
        self._session = session
        self._suspended: list[Suspended] = []
        self._said: set[str] = set()

    def suspend(self, stop: str) -> None:
        """Give the memory back if all ranks come here in time for the same ``stop``; else no rank does."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        try:
            backends = self._backends(module) if module is not None else []
            # ncclCommSuspend waits for all ranks of a group without a limit, so the ranks agree before, in the store of
            # their process groups.
            agreed = bool(backends) and _agreed(module, f"cadenza/suspend/{self._session}/{stop}")
        except Exception as error:  # noqa: BLE001 - torch's private names, and a store whose process may be gone
            _log.warning("NCCL keeps its GPU memory: %s: %s", type(error).__name__, error)
            return
        if not agreed:
            return
        free, sizes = _free_bytes(), list[tuple[int, int, int]]()
        for backend, gpu in backends:
            stats = _stats(backend)
            if self._suspend(backend):
                sizes.append((gpu, stats.get("suspend", 0), stats.get("total", sys.maxsize)))
        if sizes:
            self.freed = _freed(sizes, free, _free_bytes())

    def _suspend(self, backend: Any) -> bool:
        """Suspend a communicator; return False if it keeps its memory."""
        refusal = ""
        try:
            backend.suspend()
        except RuntimeError as error:
            refusal = str(error)
        if IDLE in refusal:
            return False
        suspended = _settled(backend, refusal)
        if suspended is False:
            _log.warning("a communicator keeps its GPU memory: %s", refusal)
            return False
        self._suspended.append(Suspended(backend, "" if suspended else refusal or "it does not say that it is"))
        return True

    def resume(self) -> None:
        """Take the memory again and wait for the other ranks; raise RestoreError if the GPU has none.

        It raises as well for a communicator of which cannot be told whether it has its memory: the rank has to end
        before its next collective, which could use memory that is gone.
        """
        while self._suspended:
            backend, doubt = self._suspended[0]
            for tries in range(RESUME_TRIES + 1):
                try:
                    backend.resume()
                    break
                except RuntimeError as error:
                    suspended = _stats(backend).get("suspended")
                    if suspended == 0 and not doubt:  # it came back all the same
                        break
                    if doubt and not suspended:
                        raise RestoreError(
                            f"a communicator of NCCL may have lost its GPU memory (suspend: {doubt}; resume: {error})"
                        ) from None
                    if tries == RESUME_TRIES:
                        raise RestoreError(f"NCCL's memory cannot come back: {error}") from None
                    _log.warning("NCCL's memory cannot come back yet: %s", error)
                    _pause.wait(RETRY_S)
            del self._suspended[0]
        self.freed = {}

    def _backends(self, module: Any) -> list[tuple[Any, int]]:
        """Return the backends of this process that can be suspended, in the order in which all ranks made their groups.

        Each comes with the index of its GPU.
        """
        if os.environ.get(KEEP) == "0" or os.environ.get(SHARE, "0") != "0":
            return []
        torch = sys.modules["torch"]
        found = []
        for group, (names, _) in module._world.pg_map.items():  # noqa: SLF001
            for name, kind in BACKENDS.items():
                if name in names:
                    # torch.distributed has no public way from a group to the backend object that has `suspend`.
                    backend = group._get_backend(torch.device(kind))  # noqa: SLF001
                    if hasattr(backend, "suspend") and (kind != "cuda" or torch.cuda.nccl.version() >= MIN_NCCL):
                        found.append((backend, _gpu_of(group)))
        blocking = [one for one in found if _is_blocking(one[0])]
        if len(blocking) < len(found) and NONBLOCKING not in self._said:
            self._said.add(NONBLOCKING)
            _log.warning(
                "NCCL keeps the GPU memory of %d communicators: they are non-blocking (%s, or config.blocking = 0)",
                len(found) - len(blocking), NONBLOCKING,
            )  # fmt: skip
        return blocking


def _settled(backend: Any, refusal: str) -> bool | None:
    """Return whether a communicator is suspended, None if that cannot be told.

    After an error other than UNTOUCHED a part of its memory may be gone, or NCCL may still be at work.
    """
    deadline = monotonic_ns() + PENDING_NS
    while True:
        suspended = _stats(backend).get("suspended")
        if suspended:
            return True
        if any(text in refusal for text in UNTOUCHED):
            return False
        if suspended is None or monotonic_ns() >= deadline:
            return None if refusal or suspended is not None else True
        _pause.wait(POLL_S)


def _stats(backend: Any) -> dict[str, int]:
    """Return NCCL's figures of a communicator's memory (``ncclCommMemStats``); empty where it says nothing."""
    try:
        return dict(backend.memory_stats())
    except (RuntimeError, AttributeError):
        return {}


def _freed(sizes: list[tuple[int, int, int]], before: dict[int, int], after: dict[int, int]) -> dict[int, int]:
    """Return the bytes that communicators take back of each GPU, from its number, and the sizes that NCCL names.

    They are the size that can be suspended, and all that NCCL has. A GPU's free memory before and after shows what is
    beyond the first, and shows other processes as well, so that the second bounds it.
    """
    found: dict[int, int] = {}
    for gpu in dict.fromkeys(gpu for gpu, _, _ in sizes):
        least = sum(size for one, size, _ in sizes if one == gpu)
        most = sum(total for one, _, total in sizes if one == gpu)
        found[gpu] = max(least, min(after.get(gpu, 0) - before.get(gpu, 0), most))
    return found


def _free_bytes() -> dict[int, int]:
    """Return the free memory of each GPU that this process uses."""
    from cadenza.sidecar.client.offload import device  # noqa: PLC0415 - it imports torch

    accelerator = device.in_use()
    return {one.index or 0: accelerator.free(one) or 0 for one in accelerator.used()} if accelerator else {}


def _gpu_of(group: Any) -> int:
    """Return the index of the GPU of a group's communicator: the one it is bound to, or that of this process."""
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.index is not None:
        return int(bound.index)
    return next(iter(_free_bytes()), 0)


def _is_blocking(backend: Any) -> bool:
    """Return True unless NCCL's calls return before they are done."""
    config = getattr(getattr(backend, "options", None), "config", None)
    return getattr(config, "blocking", None) != 0 and os.environ.get(NONBLOCKING, "").lower() not in TRUE


def _agreed(module: Any, key: str) -> bool:
    """Return whether all ranks have come here; each of them hears the same."""
    store, deadline = module._get_default_store(), monotonic_ns() + AGREE_NS  # noqa: SLF001
    verdict = f"{key}/verdict"
    if store.add(f"{key}/ready", 1) == module.get_world_size():
        store.compare_set(verdict, "", YES)
    while not store.check([verdict]) and monotonic_ns() < deadline:
        _pause.wait(POLL_S)
    # compare_set returns the value that is there: a rank whose time is over cannot overrule a YES that others act on.
    agreed = bool(store.compare_set(verdict, "", NO) == YES.encode())
    if not agreed:
        _log.warning("NCCL keeps its GPU memory: not all ranks came to suspend it within %d s", AGREE_NS // 10**9)
    return agreed
