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
MARK = "CADENZA_ATTACHED_PID"
"""Set in the environment of a process that attached by itself: what it starts is no rank of the job."""

_log = logging.getLogger("cadenza.client")


def install() -> None:
    """Follow the optimizers of this process as soon as torch's are imported; costs nothing before."""
    module = sys.modules.get(OPTIMIZER_MODULE)
    if module is None:
        sys.meta_path.insert(0, _Importer())
    else:
        _follow(module)


def uninstall() -> None:
    """Follow no optimizer any more."""
    while _hooks:
        _hooks.pop().remove()


def _follow(module: ModuleType) -> None:
    """Call a follower after every step of every optimizer."""
    _hooks.append(module.register_optimizer_step_post_hook(Follower().stepped))


_hooks: list[Any] = []
"""Handles of the hooks in torch."""


class _Importer:
    """Finds torch's optimizer module once, as the other finders do, and hooks it when it has run."""

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
                _hook_loader(spec.loader)
                return spec
        return None


def _hook_loader(loader: Any) -> None:
    """Make a loader's next execution of a module end with the hook."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _follow(module)

    loader.exec_module = exec_module


class Follower:
    """Follows a process's optimizers; a step of the first one alive is a boundary, so GANs count once.

    Everything is held weakly, so that a model lives no longer than without this.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._others: list[tuple[str, weakref.ref[Any]]] = []
        self._primary: weakref.ref[torch.optim.Optimizer] | None = None
        self._session: Session | None = None
        self._off = False

    def stepped(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Count a step (torch's hook); the parameters are updated and gradients still there."""
        if not self._off and optimizer not in self._optimizers:
            self._meet(optimizer)
        session = self._session
        if self._off or session is None:
            return
        if not session.automatic:  # the script attached by itself meanwhile and calls its own boundaries
            self._off = True
            return
        primary = self._primary() if self._primary else None
        if primary is None:
            self._primary = weakref.ref(optimizer)
        if primary is None or primary is optimizer:
            session.boundary()

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in an optimizer seen for the first time, and whatever lives beside it by now."""
        from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

        known = process.current()
        if why := self._why_not(known is not None and not known.automatic):
            _log.info("no-code attach stands down: %s", why)
            self._off = True
            return
        self._optimizers.add(optimizer)
        self._others = [(name, weakref.ref(thing)) for name, thing in _live_state()]
        if self._session is None:
            self._session = known or process.prepare()
            self._session.automatic = True
            os.environ[MARK] = str(os.getpid())
            process.attach([("modules", self._alive_others), ("optimizers", self._alive_optimizers)])

    @staticmethod
    def _why_not(attached: bool) -> str:  # noqa: FBT001
        """Return why this process is not followed, or ""."""
        import torch  # noqa: PLC0415

        if attached:
            return "the script calls attach() itself"
        parent = os.environ.get(MARK, "")
        if parent not in {"", str(os.getpid())}:
            return f"process {parent}, which started this one, is the job's rank"
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return "the optimizer steps inside the backward pass, where a job cannot stop"
        return ""

    def _alive_optimizers(self) -> list[object]:
        """Return the optimizers that still live."""
        return list(self._optimizers)

    def _alive_others(self) -> dict[str, object]:
        """Return the modules and scalers that still live, by name."""
        return {name: thing for name, ref in self._others if (thing := ref()) is not None}


def _live_state() -> list[tuple[str, object]]:
    """Return all root modules and gradient scalers of the process, named by class."""
    import torch  # noqa: PLC0415

    kinds = (torch.nn.Module, torch.amp.GradScaler)
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    inner = {id(child) for thing in found for child in (vars(thing).get("_modules") or {}).values()}
    roots = [
        thing
        for thing in found
        if id(thing) not in inner and (not isinstance(thing, torch.nn.Module) or "_modules" in vars(thing))
    ]
    return [(f"{type(thing).__name__}#{number}", thing) for number, thing in enumerate(roots)]
