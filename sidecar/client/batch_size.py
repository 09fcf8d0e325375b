"""How many samples a rank trains a step: the user's choice of what stays the same on another number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.session import identity

BATCH_ENV = "CADENZA_BATCH"
"""Set in each task by Cadenza's SPANK plugin, from ``--cadenza=batch=global|per-gpu``."""


def batch(size: int, gpus: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the samples that this rank trains a step; one rank uses one GPU.

    ``size`` is the batch of the whole job with ``gpus`` GPUs. With *global* (the default) it stays that of the whole
    job; with *per-gpu* each GPU keeps its part, and the whole batch grows and shrinks with them. Raises UsageError
    when the samples cannot be divided evenly, or when the choice is neither of the two.
    """
    rule = environ.get(BATCH_ENV) or "global"
    if rule not in ("global", "per-gpu"):
        raise UsageError(f"{BATCH_ENV} must be global or per-gpu, not {rule!r}")
    parts = identity.world_size(environ) if rule == "global" else gpus
    if size < 1 or parts < 1 or size % parts:
        raise UsageError(f"a batch of {size} cannot be split evenly over {parts} GPUs")
    return size // parts
