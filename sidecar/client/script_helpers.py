"""Functions for scripts beyond turns: a rank's batch size, and results for the job's sweep."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping

from cadenza.sidecar.client import clock
from cadenza.sidecar.client.bootstrap import process
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.session import identity

BATCH_ENV = "CADENZA_BATCH"
"""Set in each task by Cadenza's SPANK plugin, from ``--cadenza=batch=global|per-gpu``."""
REPORT_ENV = "CADENZA_SWEEP_REPORT"
"""File for a configuration's results; `cadenza sweep` sets it in each job."""

_log = logging.getLogger("cadenza.client")
_warned: set[str] = set()


def batch(size: int, gpus: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return this rank's samples per step; one rank uses one GPU. See ``cadenza.sidecar.client.batch``.

    Raises UsageError when the samples cannot be divided evenly, or when the rule is neither of the two.
    """
    rule = environ.get(BATCH_ENV) or "global"
    if rule not in ("global", "per-gpu"):
        raise UsageError(f"{BATCH_ENV} must be global or per-gpu, not {rule!r}")
    parts = identity.world_size(environ) if rule == "global" else gpus
    if size < 1 or parts < 1 or size % parts:
        raise UsageError(f"a batch of {size} cannot be split evenly over {parts} GPUs")
    return size // parts


def report(value: float, step: int | None) -> None:
    """Append one result to the sweep's file; see ``cadenza.sidecar.client.report``."""
    path = os.environ.get(REPORT_ENV)
    who = identity.here()
    if not path or (who is not None and who.rank != 0):
        return
    session = process.current()
    at = step if step is not None else session.step if session is not None else 0
    line = json.dumps({"step": int(at), "value": float(value), "time_s": clock.wall_s()}) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, line.encode())  # one call, so that lines of several processes never mix
        finally:
            os.close(file)
    except OSError as error:
        if path not in _warned:
            _warned.add(path)
            _log.warning("%s: cannot be written (%s), so the sweep gets no results of this job", path, error.strerror)
