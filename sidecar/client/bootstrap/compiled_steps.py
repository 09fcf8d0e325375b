"""Optimizer steps that ``torch.compile`` traces: Cadenza adds nothing to the program, and still learns of each step.

Dynamo inlines the hooks of a step that it traces, and breaks the program at what it cannot trace, or raises for
``fullgraph=True``. It reads attributes of functions and marks of code objects; setting them imports nothing of it.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    Stepped = Callable[[torch.optim.Optimizer], None]

DYNAMO = "torch._dynamo"
EVAL_FRAME = "_dynamo/eval_frame.py"


def exclude(function: Any) -> None:
    """Let Dynamo neither inline nor compile a function: a traced program breaks at its call."""
    function._torchdynamo_disable = True  # noqa: SLF001
    skip_frames(function)


def skip_frames(function: Any, *, callees: bool = True) -> None:
    """Let Dynamo run a function's frames as they are; from torch 2.7 on also those that it calls, with ``callees``."""
    frames = _eval_frame()
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction  # noqa: SLF001
        strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)  # noqa: SLF001
        frames.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)


def step_hook(stepped: Stepped) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    """Return a post hook for ``torch.optim.optimizer`` that calls ``stepped`` after each step, a traced one too."""
    traced = TracedSteps(stepped)
    set_callback = getattr(_eval_frame(), "set_eval_frame", None)

    def hook(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if set_callback is None or DYNAMO not in sys.modules:
            stepped(optimizer)
            return
        callback = set_callback(None)  # Dynamo compiles nothing that is called from here
        try:
            traced.passed(optimizer)
            stepped(optimizer)
        finally:
            set_callback(callback)

    note = traced.note

    def noted() -> int:
        return note()

    def stand_in(_optimizer: object, _args: object, _kwargs: object) -> None:
        noted()

    noted._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - called while Dynamo traces
    hook._torchdynamo_inline = stand_in  # type: ignore[attr-defined]  # noqa: SLF001 - traced in the hook's place
    skip_frames(hook)
    return hook


class TracedSteps:
    """Optimizers whose steps may be part of compiled programs; each such program is followed where it returns.

    Nothing of Python runs at a step inside a program. The versions of the parameters tell whether there was one.
    """

    def __init__(self, stepped: Stepped) -> None:
        self._stepped = stepped
        self._versions: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def note(self) -> int:
        """Follow the program that is being traced in this thread; return 0, since Dynamo keeps the result."""
        if (frame := _outermost()) is not None:
            hooks, leaving = frame.f_locals["self"].enter_exit_hooks, frame.f_locals.get("cleanups")
            if self._entered not in hooks:
                hooks.append(self._entered)
                if isinstance(leaving, list):  # of the call that traces
                    leaving.append(self._left)
            for thing in gc.get_objects():
                if issubclass(type(thing), torch.optim.Optimizer):
                    self._versions.setdefault(thing, _version(thing))
        return 0

    def passed(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that was not part of a program, so that the program's end does not."""
        if optimizer in self._versions:
            self._versions[optimizer] = _version(optimizer)

    def _entered(self) -> Callable[[], None]:
        return self._left

    def _left(self) -> None:
        """Count the steps of a program that has returned."""
        for optimizer, before in list(self._versions.items()):
            if (now := _version(optimizer)) != before:
                self._versions[optimizer] = now
                self._stepped(optimizer)


def _version(optimizer: torch.optim.Optimizer) -> int:
    """Return a number that each step raises."""
    return sum(one._version for group in optimizer.param_groups for one in group["params"])  # noqa: SLF001


def _outermost() -> FrameType | None:
    """Return the frame of the outermost compiled function that this thread is in."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    found = None
    while frame is not None:
        if frame.f_code.co_filename.endswith(EVAL_FRAME) and hasattr(frame.f_locals.get("self"), "enter_exit_hooks"):
            found = frame
        frame = frame.f_back
    return found


def _eval_frame() -> Any:
    """Return the C module behind Dynamo, which is there without Dynamo; None if this torch has none."""
    return getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)  # noqa: SLF001
