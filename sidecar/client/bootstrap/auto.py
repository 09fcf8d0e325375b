"""Attach without a change to the script: the first optimizer step attaches, and steps are boundaries."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from cadenza.sidecar.client.bootstrap.no_turns import Watch
    from cadenza.sidecar.client.session.job_session import Session

OPTIMIZER_MODULE = "torch.optim.optimizer"
LATE_ENV = "CADENZA_LATE"
"""Set to 1 by the SPANK plugin in the tasks of a job that starts without its lease."""
ATTACHED_ENV = "CADENZA_ATTACHED_PID"
"""Set by a process that attached automatically, because its child processes are not ranks of the job."""

MIN_OTHERS = 8
OTHERS_FACTOR = 4
"""Steps of another optimizer, without one of the primary, after which it takes over: at least so many, and so many
times the most that there were between two steps of the primary."""

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
    while _endings:
        _endings.pop()()


def _follow(module: ModuleType) -> None:
    """Call a follower after every step of every optimizer, if this torch has all that the client needs."""
    from cadenza.sidecar.client.bootstrap import no_turns, process  # noqa: PLC0415
    from cadenza.sidecar.client.session import compiled_steps, resources  # noqa: PLC0415

    if old := process.outdated_torch():
        _log.warning("this process runs as without Cadenza: PyTorch %s is older than 2.4", old)
        return
    if process.REHEARSAL_ENV in os.environ:
        from cadenza.sidecar.client.bootstrap import rehearsal_record  # noqa: PLC0415

        rehearsal_record.follow(module)  # first, because the boundary may be the last that this process does
    resources.note_default_threads(sys.modules["torch"].get_num_threads())
    if not _is_child_of_rank():
        follower = OptimizerFollower(no_turns.Watch())
        handle = module.register_optimizer_step_post_hook(compiled_steps.step_hook(follower.stepped))
        _endings.extend((handle.remove, follower.watch.end))
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


_endings: list[Callable[[], object]] = []
"""Functions that take the hooks out of torch."""


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
    """Follows a process's optimizers: a step of one of them, the primary, is a boundary, so that GANs count once.

    All references are weak, so that no model lives longer because of it.
    """

    def __init__(self, watch: Watch) -> None:
        import torch  # noqa: PLC0415

        self.watch = watch
        self._graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._primary: weakref.ref[torch.optim.Optimizer] | None = None
        self._others: dict[int, int] = {}
        """Steps of each other optimizer, by its id, since the last step of the primary."""
        self._most_others = 0
        """The most of them between two steps of the primary."""
        self._session: Session | None = None
        self._off = False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; the parameters are updated and the gradients still exist."""
        if self._off:
            return
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
        if self._graph_task() != -1:  # a job cannot stop inside a backward pass
            self.watch.in_backward = True
            return
        session = self._session or self._join()
        if session is None or not session.automatic:  # the script attaches by itself and calls its own boundaries
            self._off = True
            self.watch.end()
        elif self._is_primary(optimizer):
            session.boundary()

    def _is_primary(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this optimizer's steps are boundaries; one takes over when the primary no longer steps."""
        primary = self._primary() if self._primary else None
        if primary is optimizer:
            if self._others:
                self._most_others = max(self._most_others, *self._others.values())
                self._others.clear()
            return True
        steps = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
        if primary is not None and steps <= max(MIN_OTHERS, OTHERS_FACTOR * self._most_others):
            return False
        self._primary = weakref.ref(optimizer)
        self._others.clear()
        self._most_others = 0
        return True

    def _join(self) -> Session | None:
        """Attach at the first step; return None where this process is not to be followed."""
        from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

        existing = process.current()
        if (existing is not None and existing.explicit) or _is_child_of_rank():
            return None
        self._session = existing or process.prepare()
        self._session.automatic = True
        os.environ[ATTACHED_ENV] = str(os.getpid())
        self.watch.end()
        sources = [("modules", _live_state), ("optimizers", lambda: list(self._optimizers))]
        return process.attach(sources, everything=True)


def _is_child_of_rank() -> bool:
    """Return whether a rank of the job that attached started this process; it is none itself."""
    return os.environ.get(ATTACHED_ENV, "") not in {"", str(os.getpid())}


def _live_state() -> dict[str, object]:
    """Return all root modules and gradient scalers that live in the process, by class and number.

    It walks all objects, so it is called when a stop comes.
    """
    import torch  # noqa: PLC0415

    kinds = (torch.nn.Module, torch.amp.GradScaler)
    # isinstance() would ask `__class__`, in which a script's lazy objects run code of their own.
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    inner = {id(child) for thing in things for child in (vars(thing).get("_modules") or {}).values()}
    roots = [
        thing
        for thing in things
        # The collector also lists modules whose __init__ has not run, and which have no parts yet.
        if id(thing) not in inner and (not isinstance(thing, torch.nn.Module) or "_modules" in vars(thing))
    ]
    return {f"{type(thing).__name__}#{number}": thing for number, thing in enumerate(roots)}
