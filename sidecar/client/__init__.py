"""The client in a job: attach, boundary, detach; stdlib and torch only.

Three lines let a training script take turns on its GPU::

    from cadenza.sidecar import client

    session = client.attach(model, optimizer)
    for batch in loader:
        ...  # forward, backward, optimizer.step(), optimizer.zero_grad()
        session.boundary(len(batch))

Importing this loads neither torch nor sockets and changes no signal handler. The client changes handlers only for a
while: those of the script run after a move of its state, not in it, and a rank that waits with its requested checkpoint
on the disk ends at once by SIGTERM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    import torch

    from cadenza.sidecar.client.checkpoints import Checkpoint
    from cadenza.sidecar.client.session.job_session import Session

__all__ = ["attach", "batch", "boundary", "checkpoint", "detach", "report"]

_ticks: list[Callable[..., None]] = []
"""Boundary of the session that attach() made; empty before it and after detach()."""


def attach(  # noqa: PLR0913 - one for each kind of state, and what may happen to it
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *others: object,
    tensors: Iterable[torch.Tensor] | Mapping[str, torch.Tensor] | Callable[[], object] = (),
    socket: str | None = None,
    refuse_resident: bool = False,
    everything: bool = False,
    spill: str | None = None,
    addresses: str = "",
) -> Session:
    """Let this process take turns on its GPU; return its session, whose ``boundary()`` ends each step.

    All state given here moves to host memory while another job has the GPU: parameters, gradients, buffers
    and optimizer state. ``others`` may be further models, optimizers, a GradScaler, containers of these, or any
    object with tensors as attributes; ``tensors`` are tensors, a mapping of names to tensors, or a function that
    returns them. Tensors stay the same objects, but their ``data_ptr()`` changes, so captured CUDA graphs refuse
    the move. Functions given to ``Session.call`` release other GPU memory of the process. No other thread may touch
    these tensors during ``boundary()``.

    Outside Slurm, or without an agent (``socket``, else ``$CADENZA_SOCKET``, else the default path), this does
    nothing and logs it once. When the job has no lease yet, the call returns once it has one. A second call adds to
    the same session. With ``refuse_resident`` any storage that cannot be released refuses the yield; otherwise only
    such a storage on a GPU does, and one in host memory stays. Memory of a GPU that belongs to nothing given here
    refuses it too, above 256 MiB and 2 % of the GPU; with ``everything`` all tensors there that Python can see move as
    well, as under `cadenza run`. ``spill`` (else ``$CADENZA_SPILL_DIR``) is a
    directory on a disk of the node to which state goes when host memory is short.

    With ``addresses="stay"`` all memory that torch has on the GPU moves and comes back at its addresses, so that CUDA
    graphs and captured pointers go on. The process must have been started by `cadenza run --graphs`. Where it cannot
    be done the reason is logged, and the addresses change as without it.
    """
    from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

    extra = tensors if callable(tensors) or isinstance(tensors, Mapping) else list(tensors)
    named: list[tuple[str, object]] = [("model", model), ("optimizer", optimizer), ("tensors", extra or None)]
    sources = [(name, thing) for name, thing in named if thing is not None]
    sources += [(f"others[{index}]", thing) for index, thing in enumerate(others)]
    joined = process.attach(
        sources,
        socket=socket,
        refuse_resident=refuse_resident,
        everything=everything,
        spill=spill,
        addresses=addresses,
    )
    joined.automatic, joined.explicit = False, True
    _ticks[:] = [joined.boundary]
    return joined


def boundary(samples: int = 0, *, training: bool = True) -> None:
    """End a training step, see ``Session.boundary``; nothing happens in a process that never attached."""
    for tick in _ticks:
        tick(samples, training=training)


def detach() -> None:
    """Leave: this process is not stopped any more. Raises UsageError while its state is in host memory."""
    from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

    process.detach()
    _ticks.clear()


def checkpoint(directory: str | os.PathLike[str], **things: Any) -> Checkpoint:
    """Return the job's checkpoint in a directory; see ``cadenza.sidecar.client.checkpoints.checkpoint``."""
    from cadenza.sidecar.client import checkpoints  # noqa: PLC0415

    return checkpoints.checkpoint(directory, **things)


def batch(size: int, gpus: int = 1) -> int:
    """Return this rank's samples per step, for a job that may run with other numbers of GPUs.

    ``size`` is the batch of the whole job with ``gpus`` GPUs. It stays the batch of the whole job
    (``--cadenza=batch=global``, the default), or each GPU keeps its part of it (``batch=per-gpu``). Call it after
    ``init_process_group``, or under torchrun or srun, which set the number of ranks. The learning rate is left to the
    script. Raises UsageError when the samples cannot be divided evenly.
    """
    from cadenza.sidecar.client import script_helpers  # noqa: PLC0415

    return script_helpers.batch(size, gpus)


def report(value: float, step: int | None = None) -> None:
    """Report a result, such as the validation loss, to the job's sweep (`cadenza sweep`); do nothing elsewhere.

    ``step`` is the progress of the training, in any unit that all configurations of the sweep share; by default it is
    the number of boundaries. Only rank 0 reports. It appends a line to a file: call it once per evaluation, not per
    step.
    """
    from cadenza.sidecar.client import script_helpers  # noqa: PLC0415

    script_helpers.report(value, step)
