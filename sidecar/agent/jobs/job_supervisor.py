"""Supervisors: one for each step that the agent makes for a job, so that a fault costs this job and no other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from cadenza.policies.core.model import JobKey
from cadenza.policies.core.text import printable
from cadenza.sidecar.agent.jobs.job_run import JobRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """One step under supervision: ``with`` it no exception leaves the block."""

    supervisor: Supervisor
    key: JobKey | None
    name: str

    def __enter__(self) -> None:
        """Begin the step."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """End the step; return True, which holds the exception back, unless the interpreter is to end."""
        if isinstance(error, Exception):
            self.supervisor.record(self, error)
        return error is None or isinstance(error, Exception)


@dataclass
class Supervisor:
    """Leaves a job alone, with the reason, once a step for it has failed; counts all faults."""

    jobs: Mapping[JobKey, JobRun]
    faults: Counter[str] = field(default_factory=Counter)
    """Steps that failed, by name."""

    def step(self, key: JobKey | None, name: str) -> Step:
        """Return the supervision of one step of a job, or without a key of a step for the whole host."""
        return Step(self, key, name)

    def record(self, step: Step, error: Exception) -> None:
        """Leave the job of a failed step alone; the log has the first fault of a job, and of each step of the host."""
        self.faults[step.name] += 1
        reason = f"{step.name} failed: {type(error).__name__}: {printable(str(error), 100)}"
        run = self.jobs.get(step.key) if step.key else None
        known = run.fault if run is not None else self.faults[step.name] > 1
        if run is not None and not run.fault:
            run.fault = f"the agent leaves it alone, because {reason}"
        if not known:
            log.error("left alone JOBID=%s: %s", step.key, reason, exc_info=error)
