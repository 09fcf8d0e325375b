"""The record of a rehearsed process: each optimizer step's losses, and checksums of all that training changes.

A rehearsal (``cadenza run --rehearse-move``) compares these lines of a run that was moved with those of one that was
not. Only a rehearsed process imports this.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cadenza.sidecar.client import clock, rng_state
from cadenza.sidecar.client.bootstrap.process import REHEARSAL_ENV
from cadenza.sidecar.client.session import identity

PACE_S = 0.01
"""Shortest time of a step, so that the rehearsal's agent, which looks at the pages now and then, sees each one."""
PACE_SAVES_S = 0.25
"""The same for a script whose own checkpoints are looked for on the disk."""
MAX_LOSSES = 1024
"""Losses of one step that are kept; an accumulation has one for each micro-batch."""


def place(directory: Path) -> Path:
    """Return the directory that stands for a checkpoint's own one in a rehearsal; outside of one, itself."""
    folder = os.environ.get(REHEARSAL_ENV)
    return Path(folder, "checkpoints", *directory.absolute().parts[1:]) if folder else directory


def follow(module: ModuleType) -> None:
    """Record each step of each optimizer of this process; ``module`` is ``torch.optim.optimizer``."""
    recorder = Recorder(Path(os.environ[REHEARSAL_ENV]))
    module.register_optimizer_step_pre_hook(recorder.stepping)
    module.register_optimizer_step_post_hook(recorder.stepped)
    tensor: Any = torch.Tensor
    tensor.backward = recorder.observing(tensor.backward)


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC of a tensor's content, of this rank's part if it is distributed."""
    local = getattr(tensor, "to_local", lambda: tensor)().detach()
    if local.is_meta or local.layout != torch.strided:
        return 0
    plain = local.resolve_conj().resolve_neg().cpu().contiguous()
    nbytes = plain.numel() * plain.element_size()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(plain.data_ptr())) if nbytes else 0


class Recorder:
    """The record of one process; it references no model or optimizer strongly, and draws no random number."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, -1
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._losses: list[str] = []

    def observing(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return torch's ``Tensor.backward`` that also keeps the value it is called on."""

        def observed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if len(self._losses) < MAX_LOSSES:
                self._losses.append(repr(tensor.detach().double().sum().item()))
            backward(tensor, *args, **kwargs)

        return observed

    def stepping(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Write what an optimizer has before its first step in this process (torch's hook)."""
        if optimizer in self._numbers:
            return
        self._numbers[optimizer] = len(self._numbers)
        names = self._find_modules(optimizer)
        label = f"{type(optimizer).__name__} {self._numbers[optimizer] + 1}"
        self._write({"kind": "begin", "label": label, "names": names, **self._state(optimizer)})

    def stepped(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Write what a step has made (torch's hook)."""
        losses, self._losses = self._losses, []
        buffers = {name: checksum(buffer) for name, buffer in self._buffers()}
        numbers = {name: zlib.crc32(repr(state).encode()) for name, state in rng_state.capture().items()}
        del numbers["seed"]
        made = {"losses": losses, "buffers": buffers, "generators": numbers, **self._state(optimizer)}
        self._write({"kind": "step", "at_s": clock.wall_s(), **made})
        threading.Event().wait(PACE_SAVES_S if "CADENZA_SAVES" in os.environ else PACE_S)

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's number, its learning rates, and checksums of its parameters and own state."""
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        state = 0
        for parameter in parameters:
            for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
                if value is not None:
                    content = checksum(value) if isinstance(value, torch.Tensor) else repr(value)
                    state = zlib.crc32(f"{key}={content};".encode(), state)
        return {
            "optimizer": self._numbers[optimizer],
            "rates": [repr(float(group["lr"])) for group in groups if "lr" in group],
            "parameters": [checksum(parameter) for parameter in parameters],
            "state": state,
        }

    def _find_modules(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Find the modules that have an optimizer's parameters, for their buffers; return the parameters' names."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        wanted = {id(parameter) for parameter in parameters}
        names: dict[int, str] = {}
        kept = {id(module) for ref in self._modules if (module := ref()) is not None}
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
        inner = {id(child) for module in modules for child in (vars(module).get("_modules") or {}).values()}
        for module in modules:
            if id(module) in inner or "_parameters" not in vars(module):
                continue
            held = {id(parameter): name for name, parameter in module.named_parameters()}
            if held.keys() & wanted:
                names = {**held, **names}
                if id(module) not in kept:
                    self._modules.append(weakref.ref(module))
        return [names.get(id(parameter), f"parameter {place}") for place, parameter in enumerate(parameters)]

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the modules, each once."""
        seen: set[int] = set()
        for module in (found for ref in self._modules if (found := ref()) is not None):
            for name, buffer in module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield name, buffer

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line by one call, so that none is cut off unless the process is killed in it."""
        if self._file < 0:
            restart = identity.number(os.environ, "SLURM_RESTART_COUNT") or 0
            who = identity.here()
            name = f"{restart}.{who.rank if who else 0}.{os.getpid()}.jsonl"
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        data = memoryview((json.dumps(line, separators=(",", ":")) + "\n").encode())
        while data:
            data = data[os.write(self._file, data) :]
