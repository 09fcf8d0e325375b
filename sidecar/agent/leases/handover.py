"""Handover files: the prolog's word on each job of this host with GPUs, written by root and for root.

The SPANK plugin writes ``jobs/NODE.JOBID`` next to the agent's socket before a job's first task, and removes it in the
epilog: ``RESTART HOSTS SHARING GPUS BATCH UID LATE GRAPHS SUMMARY``, and a line ``1`` of a step that no agent answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from cadenza.sidecar.bounds import Count, Gpus, JobId, Name, Restart, Uid

log = logging.getLogger(__name__)

SHARES = 2
"""The comment's word that the job shares (``SHARING_YES`` in the plugin)."""
MAX_BYTES = 4096
_CONTENT = re.compile(r"(\d{1,10}) (\d{1,10}) ([012]) ([\d,-]{1,400}) [01](?: (\d{1,10})(?: [01]){0,3})?\s*(?:1\s*)?")
_LANE = re.compile(r"-l(\d{1,4})$")


class Handover(NamedTuple):
    """One job as the prolog saw it; ``uid`` is None in files of an older plugin."""

    job: JobId
    restart: Restart
    node: Name
    hosts: Count
    shares: bool
    gpus: Gpus
    uid: Uid | None

    @property
    def lane(self) -> int:
        """The lane of its node: ``n1-l2`` is lane 2 of its host, any other name lane 0."""
        found = _LANE.search(self.node)
        return int(found[1]) if found else 0


def read_all(directory: Path) -> tuple[Handover, ...]:
    """Return the handover files in ``directory``; none if others than root could have written there.

    A job has one on each lane of the host where Slurm has started it, if it was started twice.
    """
    try:
        status = directory.stat()
        paths = sorted(directory.iterdir())
    except OSError:
        return ()
    # A lease follows from these files, so that a user who could write one would have any GPU.
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
        log.error("%s: not used: others than root may write there", directory)
        return ()
    found = (_read(path) for path in paths)
    return tuple(one for one in found if one is not None)


def _read(path: Path) -> Handover | None:
    """Return one file's content; None if it is none of the plugin's."""
    node, _, job = path.name.rpartition(".")
    try:
        with path.open("rb") as file:
            content = _CONTENT.fullmatch(file.read(MAX_BYTES).decode("ascii", errors="replace"))
    except OSError:
        return None
    if content is not None:
        restart, hosts, sharing, gpus, uid = content.groups()
        fields = (job, restart, node, hosts, int(sharing) == SHARES, _indices(gpus), uid)
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(fields, Handover, strict=False)
    log.warning("%s: not used: not written by this plugin", path)
    return None


def _indices(text: str) -> tuple[int, ...]:
    """Return the GPUs of a list such as ``0,2-3``."""
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in text.split(",")]
    spans = [range(int(first), min(int(last), 1023) + 1) for first, last in ends if first and last]
    return tuple(sorted({index for span in spans for index in span}))
