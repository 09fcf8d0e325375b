"""Steps that ``torch.compile`` traces: Cadenza adds nothing to the program, and still learns of each one.

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
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    Stepped = Callable[[torch.optim.Optimizer], None]

DYNAMO = "torch._dynamo"
EVAL_FRAME = "_dynamo/eval_frame.py"


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


_followers: list[Stepped] = []
_hooks: list[Any] = []
"""The hook that calls them, once it is in torch."""


def follow_steps(stepped: Stepped) -> Callable[[], None]:
    """Call a function after each optimizer step from here on; return what ends it."""
    prepare_to_follow()
    _followers.append(stepped)
    return lambda: _followers.remove(stepped)


def prepare_to_follow() -> None:
    """Put the hook for ``follow_steps`` into torch; it stays, because compiled steps would be compiled anew without."""
    if not _hooks:
        _hooks.append(step_hook(_tell_followers))
        register_optimizer_step_post_hook(_hooks[0])


def _tell_followers(optimizer: torch.optim.Optimizer) -> None:
    for follower in (*_followers,):
        follower(optimizer)


def end_steps_after_programs(boundary: Any) -> None:
    """Have a boundary that is called inside a program follow once the program has returned, as often as it was called.

    The job cannot stop inside a program, which only adds to a list; that is empty whenever a program begins, so that
    no guard fails. Where nothing is known of the program around it, it breaks at the call.
    """
    boundary._torchdynamo_inline = _stand_in  # noqa: SLF001 - traced in its place; a closure would be looked for there
    skip_frames(boundary)


_ended: list[tuple[Any, int, bool]] = []
"""Boundaries that the program that runs has come by: session, samples, and whether it was of a training."""


def _stand_in(session: Any, samples: int = 0, *, training: bool = True) -> None:
    if _noted():
        _ended.append((session, samples, training))
    else:
        _end_step(session, samples, training)


def _end_step(session: Any, samples: int, training: bool) -> None:  # noqa: FBT001
    session.boundary(samples, training=training)


_end_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001


def _noted() -> bool:
    """Return whether the program that is being traced ends its steps; Dynamo calls this, and keeps the result."""
    return _follow_program(_entered, last=True)


_noted._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def _entered() -> Callable[[], None]:
    return _left


def _left() -> None:
    """End the steps of a program that has returned."""
    ended, _ended[:] = _ended[:], ()
    for one in ended:
        _end_step(*one)


class TracedSteps:
    """Optimizers whose steps may be part of compiled programs; each such program is followed where it returns.

    Nothing of Python runs at a step inside a program. The versions of the parameters tell whether there was one.
    """

    def __init__(self, stepped: Stepped) -> None:
        self._stepped = stepped
        self._versions: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def note(self) -> int:
        """Follow the program that is being traced in this thread; return 0, since Dynamo keeps the result."""
        if _follow_program(self._entered):
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


def _follow_program(entered: Callable[[], Callable[[], None]], *, last: bool = False) -> bool:
    """Call ``entered`` each time that the program traced in this thread begins, and its result at the program's end.

    ``last``: after all others that are called like that. Returns False if no program is known.
    """
    frame = _outermost()
    if frame is None:
        return False
    hooks, leaving = frame.f_locals["self"].enter_exit_hooks, frame.f_locals.get("cleanups")
    if entered not in hooks:
        # A program that returns runs its hooks in this order: steps must be counted before their boundaries are ended.
        hooks.insert(len(hooks) if last else 0, entered)
        if isinstance(leaving, list):  # of the call that traces
            leaving.insert(len(leaving) if last else 0, entered())
    return True


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
