"""Files that say which job has each GPU now, in the forms of dcgm-exporter and of jobstats.

``gpu-jobs/N`` has the job's number, one line for each job of a pack (dcgm-exporter, ``--hpc-job-mapping-dir``; N is
NVML's index). ``gpustat/N`` and ``gpustat/UUID`` have ``JOB UID`` (jobstats' exporter, which takes one job only). A GPU
that no job has now has no file: dcgm-exporter leaves a GPU with an empty one out of its metrics.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable
from cadenza.sidecar.agent.telemetry.gpu_watch import Look

log = logging.getLogger(__name__)

DRAFT = ".new-"
"""Begin of the name of a file that is being written: neither exporter takes it for a GPU."""


class GpuJobFiles:
    """The files of one host, below the directory of the agent's socket."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: tuple[object, ...] = ()
        self._written: Mapping[str, str] | None = None
        """Content by path; None before the first time, when files of an earlier agent may be there."""

    def write(self, leases: LeaseTable, look: Look) -> None:
        """Bring the files up to date with the leases that are on disk; a file that cannot be written is removed."""
        seen = leases.changed, look.names, look.divided
        if seen == self._seen:
            return
        wanted = {} if look.divided else contents(leases, look.names)
        if self._written is None:
            found: dict[str, str] = {}
            for folder in (self._run / "gpu-jobs", self._run / "gpustat"):
                with contextlib.suppress(OSError):
                    folder.mkdir(mode=0o755, exist_ok=True)
                    found |= {f"{folder.name}/{file.name}": "" for file in folder.iterdir()}
            self._written = found
        for name in self._written.keys() - wanted.keys():
            with contextlib.suppress(OSError):
                (self._run / name).unlink(missing_ok=True)
        for name, text in wanted.items():
            if self._written.get(name) != text:
                self._put(self._run / name, text)
        self._seen, self._written = seen, wanted

    def _put(self, path: Path, text: str) -> None:
        draft = path.with_name(f"{DRAFT}{path.name}")
        try:
            draft.write_text(text, encoding="ascii")
            draft.replace(path)
        except OSError as error:
            log.warning("%s: not written (%s): exporters do not know the GPU's job", path, error.strerror)
            for file in (draft, path):  # no job is better than the one before
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)


def contents(leases: Iterable[Lease], names: Mapping[int, tuple[str, ...]]) -> dict[str, str]:
    """Return the content of each file by its path (pure).

    ``names``: those that exporters have for a GPU, NVML's index first, by Slurm's index; without NVML they are alike.
    """
    holders: dict[int, list[Lease]] = {}
    for lease in sorted((one for one in leases if one.occupying), key=lambda one: (one.held_since_s, one.job)):
        for gpu in lease.gpus:
            holders.setdefault(gpu, []).append(lease)
    files = {}
    for gpu, jobs in holders.items():
        known = names.get(gpu) or (str(gpu),)
        files[f"gpu-jobs/{known[0]}"] = "".join(f"{lease.job}\n" for lease in jobs)
        files |= {f"gpustat/{name}": f"{jobs[0].job} {jobs[0].uid}\n" for name in known}
    return files
