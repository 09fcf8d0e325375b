"""The client in a job: attach, boundary, detach; stdlib and torch only.

Three lines let a training script take turns on its GPU::

    from cadenza.sidecar import client

    session = client.attach(model, optimizer)
    for batch in loader:
        ...  # forward, backward, optimizer.step(), optimizer.zero_grad()
        session.boundary(len(batch))

Importing this takes neither torch nor a socket and changes no signal handler. Nothing ever changes one, but for SIGTERM
while a rank stands with its ordered checkpoint on the disk: it ends at once then, and the handler is put back if not.
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
"""The boundary of the session that attach() made; empty before, and after detach()."""


def attach(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *others: object,
    tensors: Iterable[torch.Tensor] | Mapping[str, torch.Tensor] | Callable[[], object] = (),
    socket: str | None = None,
    refuse_resident: bool = False,
    spill: str | None = None,
) -> Session:
    """Let this process take turns on its GPU; return its session, whose ``boundary()`` ends each step.

    Everything given moves to host memory while another job has the GPU: parameters, gradients, buffers
    and optimizer state; ``others`` may be further models, optimizers, a GradScaler, containers of these,
    or any object with tensors as attributes; ``tensors`` are tensors, by name if a mapping, or a function
    that returns them when asked. Tensors stay the same objects; ``data_ptr()`` does not stay the same, so
    captured CUDA graphs refuse the move. What else the process keeps on the GPU is let go of by functions given
    to ``Session.call``. No other thread may touch these tensors during ``boundary()``.

    Outside Slurm, or without an agent (``socket``, else ``$CADENZA_SOCKET``, else its usual place), this
    does nothing and says so once. When the job has no lease yet, the call returns once it has. A second
    call adds to the same session. ``refuse_resident`` refuses to yield when any storage cannot be released;
    otherwise host storages that cannot stay where they are, and only those on a GPU refuse it. ``spill`` (else
    ``$CADENZA_SPILL_DIR``) is a directory on a disk of the node to which state goes when host memory is short.
    """
    from cadenza.sidecar.client.bootstrap import process  # noqa: PLC0415

    extra = tensors if callable(tensors) or isinstance(tensors, Mapping) else list(tensors)
    named: list[tuple[str, object]] = [("model", model), ("optimizer", optimizer), ("tensors", extra or None)]
    sources = [(name, thing) for name, thing in named if thing is not None]
    sources += [(f"others[{index}]", thing) for index, thing in enumerate(others)]
    joined = process.attach(sources, socket=socket, refuse_resident=refuse_resident, spill=spill)
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
    """Return the samples that this rank trains a step, for a job that may run with other numbers of GPUs.

    ``size`` is the batch of the whole job with ``gpus`` GPUs. It stays the whole job's (``--cadenza=batch=global``, the
    default), or each GPU keeps its part of it (``batch=per-gpu``). Call it after ``init_process_group`` or under
    torchrun or srun, which say how many ranks there are. The learning rate is the script's own matter. Raises
    UsageError when the samples cannot be divided evenly.
    """
    from cadenza.sidecar.client import batch_size  # noqa: PLC0415

    return batch_size.batch(size, gpus)


def report(value: float, step: int | None = None) -> None:
    """Tell the job's sweep (`cadenza sweep`) a result, such as the validation loss; elsewhere nothing happens.

    ``step`` is how far the training is, in any unit that all configurations of the sweep share; without it, the number
    of boundaries so far. Rank 0's word counts. It appends a line to a file: call it once an evaluation, not a step.
    """
    from cadenza.sidecar.client import sweep_report  # noqa: PLC0415

    sweep_report.report(value, step)
