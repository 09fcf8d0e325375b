"""CUDA's process checkpoint API through ``cuda.bindings``; only the helper process imports this."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.agent.errors import AgentError

MIN_VERSION = 12080
"""cuDriverGetVersion of driver 570, the first with the API."""
MIN_REMAP_VERSION = 13000
"""cuDriverGetVersion of driver 580, the first that restores onto other GPUs."""
STATES = {0: "running", 1: "locked", 2: "checkpointed", 3: "failed"}
"""CUprocessState; higher values belong to custom storage, which is not used here."""


class CudaError(AgentError):
    """The driver refused a call; the message is its name of the error."""


class Cuda:
    """The driver's API, initialized. Calls release the interpreter's lock and may take long, or never return."""

    def __init__(self) -> None:
        self._driver = bindings()
        try:
            self._check(self._driver.cuInit(0))
            (self.version,) = self._check(self._driver.cuDriverGetVersion())
        except (CudaError, RuntimeError) as error:
            raise EnvironmentLacks(f"no CUDA driver to be used here: {error}") from None
        if self.version < MIN_VERSION:
            raise EnvironmentLacks(
                f"the driver's CUDA is {_dotted(self.version)}; process checkpoints need 12.8 (driver 570 or later)"
            )

    def state(self, pid: int) -> str:
        """Return a process's state; raise CudaError, as for a process that does not use CUDA."""
        (state,) = self._check(self._driver.cuCheckpointProcessGetState(pid))
        return STATES.get(int(state), "failed")

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Block a process's CUDA calls and wait for its submitted work; after the time-out it runs on."""
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._check(self._driver.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        """Copy a locked process's GPU memory into its own host memory and free the GPUs."""
        self._check(self._driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """Bring a checkpointed process back, onto other GPUs of the same chip by ``pairs`` of UUIDs."""
        if pairs and self.version < MIN_REMAP_VERSION:
            raise CudaError(f"restoring onto other GPUs needs driver 580, CUDA 13.0; this is {_dotted(self.version)}")
        uuids = [[ctypes.create_string_buffer(_uuid(text), 16) for text in pair] for pair in pairs]
        self._check(self._driver.cuCheckpointProcessRestore(pid, self._mapping(uuids) if uuids else None))

    def _mapping(self, uuids: Sequence[Sequence[Any]]) -> Any:
        """Return the arguments of a restore; the caller keeps the buffers until it has returned."""
        pairs = []
        for old, new in uuids:
            pair = self._driver.CUcheckpointGpuPair()
            pair.oldUuid = self._driver.CUuuid(ctypes.addressof(old))
            pair.newUuid = self._driver.CUuuid(ctypes.addressof(new))
            pairs.append(pair)
        arguments = self._driver.CUcheckpointRestoreArgs()
        arguments.gpuPairs = pairs
        arguments.gpuPairsCount = len(pairs)
        return arguments

    def unlock(self, pid: int) -> None:
        """Let a locked process call CUDA again."""
        self._check(self._driver.cuCheckpointProcessUnlock(pid, None))

    def _check(self, answer: Sequence[Any]) -> Sequence[Any]:
        """Return a call's values after its result code; raise CudaError unless that is success."""
        if int(answer[0]):
            name = getattr(answer[0], "name", str(answer[0]))
            raise CudaError(f"{name}: needs root or CAP_SYS_PTRACE" if name.endswith("NOT_PERMITTED") else name)
        return answer[1:]


def bindings() -> Any:
    """Return the module of the driver's API; raise EnvironmentLacks without one that has checkpoints."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - an optional extra, and only the helper's
    except ImportError as error:
        raise EnvironmentLacks(
            f"cuda-bindings is not installed (pip install 'cadenza-agent[driver]'): {error}"
        ) from None
    names = ("cuCheckpointProcessLock", "CUcheckpointLockArgs", "CUcheckpointRestoreArgs", "CUcheckpointGpuPair")
    if missing := [name for name in names if not hasattr(driver, name)]:
        raise EnvironmentLacks(f"this cuda-bindings has no {missing[0]}: install 12.8, or 13.0.2 and not 13.3.0")
    return driver


def _uuid(text: str) -> bytes:
    """Return the 16 bytes of a UUID as nvidia-smi writes it; raise CudaError for another text."""
    try:
        raw = bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
    except ValueError:
        raw = b""
    if len(raw) != 16:  # noqa: PLR2004 - RFC 9562
        raise CudaError(f"{text!r} is no GPU's UUID")
    return raw


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
