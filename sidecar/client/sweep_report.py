"""A job's results for its sweep: a line in a file for each, written where and when the script says it."""

from __future__ import annotations

import json
import logging
import os

from cadenza.sidecar.client import clock
from cadenza.sidecar.client.bootstrap import process
from cadenza.sidecar.client.session import identity

REPORT_ENV = "CADENZA_SWEEP_REPORT"
"""The file for a configuration's results; `cadenza sweep` sets it in each job."""

_log = logging.getLogger("cadenza.client")
_said: set[str] = set()


def report(value: float, step: int | None) -> None:
    """Append one result; see ``cadenza.sidecar.client.report``."""
    path = os.environ.get(REPORT_ENV)
    who = identity.here()
    if not path or (who is not None and who.rank != 0):
        return
    session = process.current()
    at = step if step is not None else session.step if session is not None else 0
    line = json.dumps({"step": int(at), "value": float(value), "time_s": clock.wall_s()})
    try:
        _append(path, line.encode() + b"\n")
    except OSError as error:
        _say_once(f"{path}: cannot be written ({error.strerror}), so the sweep does not see this job's results")


def _append(path: str, line: bytes) -> None:
    """Write a line as a whole: at the file's end, in one call."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning(text)
