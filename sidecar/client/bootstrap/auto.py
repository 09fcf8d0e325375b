"""Attach without a change to the script: the first optimizer step attaches, each one is a boundary."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from cadenza.sidecar.client.session.job_session import Session

OPTIMIZER_MODULE = "torch.optim.optimizer"
LATE_ENV = "CADENZA_LATE"
"""Set to 1 by the SPANK plugin in the tasks of a job that starts without its lease."""
ATTACHED_ENV = "CADENZA_ATTACHED_PID"
"""Set by a process that attached automatically, because its child processes are not ranks of the job."""

_log = logging.getLogger("cadenza.client")


def install() -> None:
    """Follow the optimizers of this process once torch's module is imported; this costs nothing before."""
    module = sys.modules.get(OPTIMIZER_MODULE)
    if module is None:
        sys.meta_path.insert(0, _Importer())
    else:
        _follow(module)


def uninstall() -> None:
    """Stop following optimizers."""
    while _hooks:
        _hooks.pop().remove()


def _follow(module: ModuleType) -> None:
    """Call a follower after every step of every optimizer, if this torch has all that the client needs."""
    from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

    if old := process.outdated_torch():
        _log.warning("this process runs as without Cadenza: PyTorch %s is older than 2.4", old)
        return
    _hooks.append(module.register_optimizer_step_post_hook(OptimizerFollower().stepped))
    if os.environ.get(LATE_ENV) == "1":
        _hold_cuda_back()


def _hold_cuda_back() -> None:
    """Let CUDA initialize in this process only once the job has its lease; torch without CUDA needs no hook.

    All of torch comes by ``torch._C._cuda_init`` before its first use of a GPU (torch.cuda._lazy_init).
    """
    import torch  # noqa: PLC0415

    initialize = getattr(torch._C, "_cuda_init", None)  # noqa: SLF001
    if initialize is None:
        return

    def initialize_with_lease() -> None:
        from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

        process.wait_for_lease()
        torch._C._cuda_init = initialize  # noqa: SLF001
        initialize()

    torch._C._cuda_init = initialize_with_lease  # noqa: SLF001


_hooks: list[Any] = []
"""Handles of the hooks in torch."""


class _Importer:
    """Import hook that finds torch's optimizer module once, through the other finders, and follows it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec for the one module, None for all others."""
        if name != OPTIMIZER_MODULE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                loader: Any = spec.loader
                execute = loader.exec_module

                def exec_module(module: ModuleType, execute: Any = execute) -> None:
                    execute(module)
                    _follow(module)

                loader.exec_module = exec_module
                return spec
        return None


class OptimizerFollower:
    """OptimizerFollower of a process's optimizers; a step of the first live one is a boundary, so GANs count once.

    All references are weak, so that no model lives longer because of it.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._others: list[tuple[str, weakref.ref[Any]]] = []
        self._primary: weakref.ref[torch.optim.Optimizer] | None = None
        self._session: Session | None = None
        self._off = False

    def stepped(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Count a step (torch's hook); the parameters are updated and the gradients still exist."""
        if not self._off and optimizer not in self._optimizers:
            self._add(optimizer)
        session = self._session
        if self._off or session is None:
            return
        if not session.automatic:  # the script has attached by itself and calls its own boundaries
            self._off = True
            return
        primary = self._primary() if self._primary else None
        if primary is None:
            self._primary = weakref.ref(optimizer)
        if primary is None or primary is optimizer:
            session.boundary()

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a new optimizer, and the modules and scalers that live by now; attach with the first one."""
        from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

        existing = process.current()
        refusal = _refusal_reason(attached=existing is not None and not existing.automatic)
        if refusal:
            _log.info("automatic attach is off: %s", refusal)
            self._off = True
            return
        self._optimizers.add(optimizer)
        self._others = [(name, weakref.ref(thing)) for name, thing in _live_state()]
        if self._session is None:
            self._session = existing or process.prepare()
            self._session.automatic = True
            os.environ[ATTACHED_ENV] = str(os.getpid())
            sources = [("modules", self._live_others), ("optimizers", lambda: list(self._optimizers))]
            process.attach(sources, everything=True)

    def _live_others(self) -> dict[str, object]:
        """Return the modules and scalers that still live, by name."""
        return {name: thing for name, ref in self._others if (thing := ref()) is not None}


def _refusal_reason(*, attached: bool) -> str | None:
    """Return the reason why this process is not followed, if there is one."""
    import torch  # noqa: PLC0415

    if attached:
        return "the script calls attach() itself"
    parent = os.environ.get(ATTACHED_ENV, "")
    if parent not in {"", str(os.getpid())}:
        return f"process {parent}, which started this one, is the job's rank"
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
        return "the optimizer steps inside the backward pass, where a job cannot stop"
    return None


def _live_state() -> list[tuple[str, object]]:
    """Return all root modules and gradient scalers of the process, named by class."""
    import torch  # noqa: PLC0415

    kinds = (torch.nn.Module, torch.amp.GradScaler)
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    inner = {id(child) for thing in things for child in (vars(thing).get("_modules") or {}).values()}
    roots = [
        thing
        for thing in things
        if id(thing) not in inner and (not isinstance(thing, torch.nn.Module) or "_modules" in vars(thing))
    ]
    return [(f"{type(thing).__name__}#{number}", thing) for number, thing in enumerate(roots)]
