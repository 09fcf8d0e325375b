"""The sentence in a job's output on a process that trains and takes no turns; with neither a thread nor a timer."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from cadenza.sidecar.client.bootstrap import process
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.session import compiled_steps

PATIENCE_NS = 100_000_000_000
"""Time after the first backward pass without an optimizer step until the sentence; accumulation can take that long."""
RUN_BACKWARD = "_engine_run_backward"
"""Function in torch.autograd through which all of Python computes gradients."""
IN_BACKWARD = "its optimizer steps inside the backward pass, where a job cannot stop"
NO_OPTIMIZER = "it computes gradients and no optimizer of torch.optim steps"
NO_TRAINING = "it uses a GPU and no optimizer of torch.optim steps"

_log = logging.getLogger("cadenza.client")


class Watch:
    """One process's watch for a training that nothing follows; ``end()`` once it is followed."""

    def __init__(self) -> None:
        self.in_backward = False
        """An optimizer has stepped inside a backward pass."""
        self._began_ns = 0
        self._pid = os.getpid()
        self._autograd: Any = sys.modules.get("torch.autograd")
        self._original: Callable[..., Any] | None = getattr(self._autograd, RUN_BACKWARD, None)
        if self._original is not None:
            original, look = self._original, self.look

            def run_backward(*args: Any, **options: Any) -> Any:
                look()
                return original(*args, **options)

            run_backward._torchdynamo_inline = original  # type: ignore[attr-defined]  # noqa: SLF001
            compiled_steps.skip_frames(run_backward, callees=False)
            compiled_steps.skip_frames(look)
            self._wrapped = run_backward
            setattr(self._autograd, RUN_BACKWARD, run_backward)
        atexit.register(self._at_exit)

    def look(self) -> None:
        """Note a backward pass; say the sentence once the first one is long ago."""
        now = monotonic_ns()
        self._began_ns = self._began_ns or now
        if now - self._began_ns >= PATIENCE_NS:
            self._say(IN_BACKWARD if self.in_backward else NO_OPTIMIZER)

    def end(self) -> None:
        """Let go of torch and of the process's end."""
        atexit.unregister(self._at_exit)
        if self._original is not None and getattr(self._autograd, RUN_BACKWARD, None) is self._wrapped:
            setattr(self._autograd, RUN_BACKWARD, self._original)
        self._original = None

    def _at_exit(self) -> None:
        """Say the sentence if this process has trained, or has used a GPU."""
        if self._began_ns:
            self._say(IN_BACKWARD if self.in_backward else NO_OPTIMIZER)
        elif _uses_gpu():
            self._say(NO_TRAINING)

    def _say(self, reason: str) -> None:
        """Warn once, in the process that trained; a script that attached by itself is followed by its own calls."""
        self.end()
        session = process.current()
        if os.getpid() == self._pid and not (session is not None and session.explicit):
            _log.warning(
                "this process takes no turns under `cadenza run`, because %s: client.attach() and client.boundary() in"
                " the script let it share its GPU",
                reason,
            )


def _uses_gpu() -> bool:
    """Return whether this process has used a GPU; nothing is initialized for the answer."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())
