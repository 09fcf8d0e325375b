"""The Slurm side of `policies.round.Gateway`: snapshots and actions through one source of Slurm.

Sources are the worker around pyslurm, and Slurm's own commands with their JSON. What they answer is the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, Self

from cadenza.policies.core.actions import (
    Action,
    DrainNode,
    MakeWay,
    NodeAction,
    OpenNode,
    Outcome,
    Place,
    Release,
    Requeue,
    SetFactor,
    Size,
    Suspend,
    Unsuspend,
)
from cadenza.policies.core.errors import CadenzaError, EnvironmentLacks
from cadenza.policies.core.model import ClusterSnapshot, JobKey, SlurmState
from cadenza.sidecar import clock
from cadenza.slurm_plugin.errors import GatewayError, NotForSlurm, StaleState, WorkerHung, WorkerLost
from cadenza.slurm_plugin.gateway.json_source import JsonSource, TextCommands, release_of_commands
from cadenza.slurm_plugin.gateway.supervisor import Supervisor
from cadenza.slurm_plugin.gateway.translate import Known, slurm_state_of, snapshot

log = logging.getLogger(__name__)


class Source(Protocol):
    """The requests of ``verbs`` with their answers."""

    def ask(self, description: str, op: str, **arguments: Any) -> Any:
        """Return the result of one request, or raise the GatewayError that names who must act."""
        ...

    def greeting(self) -> dict[str, Any]:
        """Return the source's versions and its user; raise a GatewayError where it does not work."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class SlurmGateway:
    """Reads the cluster and carries out Slurm's actions; those of the agents, such as Yield, are refused."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known = Known({}, {})
        self.answer_s: float | None = None
        """Time that Slurm itself took for the last reading, seconds; None where that is not known."""
        self.asked: Callable[[str, str, float], object] = lambda _request, _result, _seconds: None
        """Called after each request with its name, *ok* or *failed*, and the seconds that it took."""

    def _ask(self, description: str, op: str, **arguments: Any) -> Any:
        began_s, result = clock.monotonic(), "failed"
        try:
            answer = self._source.ask(description, op, **arguments)
            result = "ok"
        finally:
            self.asked(op, result, clock.monotonic() - began_s)
        return answer

    def read(self) -> ClusterSnapshot:
        """Return jobs and nodes as they are now, without leases; a GatewayError when Slurm does not answer.

        Costs slurmctld one RPC, for all jobs; up to four more for nodes, partitions, reservations and its own start
        where these may have changed, and each minute three for the site's rules.
        """
        before_s = getattr(self._source, "waited_s", None)
        raw = self.read_raw()
        self.answer_s = self._source.waited_s - before_s if before_s is not None else None  # type: ignore[attr-defined]
        return snapshot(raw, self._known)

    def look(self, jobs: Collection[int]) -> Mapping[JobKey, SlurmState]:
        """Return the state of a few jobs, which costs slurmctld one small RPC each."""
        answers = self._ask("looking at jobs", "look", jobs=sorted(jobs))
        return dict(state for answer in answers if (state := slurm_state_of(answer)) is not None)

    def read_raw(self) -> dict[str, Any]:
        """Return the source's answer, as a recording keeps it."""
        return dict(self._ask("reading the cluster", "read"))

    def apply(self, action: Action) -> Outcome:
        """Carry out one action; a failure is an Outcome that names who must act."""
        try:
            self.act(action)
        except CadenzaError as error:
            return Outcome(ok=False, error=str(error))
        return Outcome(ok=True)

    def act(self, action: Action) -> None:
        """Carry out one action, or raise a GatewayError.

        An action on another incarnation of the job than it names is refused as StaleState.
        """
        match action:
            case Suspend(job=key):
                self._job(f"suspend job {key}", "suspend", key)
            case Unsuspend(job=key):
                self._job(f"resume job {key}", "unsuspend", key)
            case Requeue(job=key, hold=hold, repair=repair):
                self._job(f"requeue job {key}", "requeue", key, hold=hold, failed=repair)
            case SetFactor(job=key, factor=factor):
                self._job(f"set the SiteFactor of job {key} to {factor}", "factor", key, factor=factor)
            case MakeWay():
                self._make_way(action)
            case Release(job=key, unpin=unpin):
                self._job(f"release job {key}", "release", key, unpin=unpin)
            case Place():
                self._place(action)
            case Size(job=key, cpus=cpus, memory_mb=memory_mb):
                self._job(f"size job {key}", "size", key, cpus=cpus, memory=memory_mb)
            case DrainNode() | OpenNode():
                self._act_on_node(action)
            case _:
                raise NotForSlurm(f"{type(action).__name__} of job {action.job} is for the agents, not Slurm")

    def _act_on_node(self, action: NodeAction) -> None:
        match action:
            case DrainNode(node=name, reason=reason):
                self._ask(f"drain node {name}", "drain", node=name, reason=reason)
            case OpenNode(node=name, drain=drain):
                self._ask(f"open node {name}", "undrain", node=name, drain=drain)

    def _make_way(self, action: MakeWay) -> None:
        """Requeue jobs with their factors; the error names those that had left their GPUs already."""
        names = ", ".join(map(str, action.jobs))
        request = f"requeue {names} to make way for job {action.for_job}"
        jobs = [
            {"job": key.id, "restart": key.restart, "factor": factor}
            for key, factor in zip(action.jobs, action.factors, strict=True)
        ]
        if left_out := self._ask(request, "make_way", jobs=jobs):
            raise StaleState(f"{request}: {'; '.join(map(str, left_out))}; the others were requeued")

    def _place(self, action: Place) -> None:
        """Change a job and release it; a job whose change is refused cannot start with the wrong request."""
        key = action.job
        changes: dict[str, Any] = {"nodes": action.nodes} if action.nodes else {}
        if action.resize:
            shares = [share._asdict() for share in action.shares]
            self._job(f"resize job {key}", "resize", key, shares=shares, now=action.elsewhere)
            return
        if action.shares:
            changes["cpus"] = sum(share.cpus for share in action.shares)
            changes["as_far_as_possible"] = True
            # A job has one request of memory, which holds on each of its nodes (sbatch(1), --mem).
            changes["memory_per_node"] = max(share.memory_mb for share in action.shares)
        if action.cpus_per_task is not None:
            changes["cpus_per_task"] = action.cpus_per_task
        if action.memory_per_node_mb is not None:
            changes["memory_per_node"] = action.memory_per_node_mb
        if action.elsewhere:
            changes["now"] = True
        where = f" on {','.join(action.nodes)}" if action.nodes else ""
        self._job(f"place job {key}{where}", "place", key, **changes)

    def ping(self) -> dict[str, Any]:
        """Return slurmctld's host and the RPC's latency in ms."""
        return dict(self._ask("ping slurmctld", "ping"))

    def greeting(self) -> dict[str, Any]:
        """Return the source's versions and its user."""
        return self._source.greeting()

    def _job(self, request: str, op: str, key: JobKey, **arguments: Any) -> Any:
        return self._ask(request, op, job=key.id, restart=key.restart, **arguments)

    def close(self) -> None:
        """End the source's processes."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def over_pyslurm() -> SlurmGateway:
    """Return the gateway over pyslurm."""
    return SlurmGateway(Supervisor())


def over_json(*, apart: bool = False) -> SlurmGateway:
    """Return the gateway over Slurm's commands and their JSON."""
    return SlurmGateway(JsonSource(apart=apart))


def over_text() -> SlurmGateway:
    """Return a gateway that can release jobs, where no version of Slurm's JSON is read."""
    return SlurmGateway(JsonSource(commands=TextCommands()))


def served_json() -> SlurmGateway:
    """Return the same for a program that reads again and again."""
    return over_json(apart=True)


def served() -> SlurmGateway:
    """Return the same as ``automatic``, for a program that reads again and again."""
    return automatic(apart=True)


def automatic(*, apart: bool = False) -> SlurmGateway:
    """Return the gateway over pyslurm where it works and is built for this machine's Slurm, else over Slurm's JSON."""
    worker = Supervisor()
    problem = problem_of(worker)
    if problem is None:
        return SlurmGateway(worker)
    worker.close()
    log.info("Slurm's JSON is read, because %s", problem)
    return SlurmGateway(JsonSource(problem, apart=apart))


def problem_of(worker: Source) -> str | None:
    """Return why pyslurm cannot be the source; None if it can, as far as a Slurm that does not answer tells."""
    try:
        pyslurm = str(worker.greeting()["pyslurm"])
        slurm = release_of_commands()
        # pyslurm has copies of Slurm's internal structures: with another release than theirs it may crash.
        if release_of(pyslurm) != release_of(slurm):
            return f"pyslurm {pyslurm} is not for Slurm {slurm}"
        worker.ask("trying pyslurm", "ping")
    except (EnvironmentLacks, WorkerLost) as error:
        return None if isinstance(error, WorkerHung) else str(error)
    except GatewayError:
        return None
    return None


def release_of(version: str) -> tuple[int, int] | None:
    """Return the release of a version of Slurm or pyslurm, whose months lack the zero; None for a text that is none.

    >>> release_of("26.05.5") == release_of("26.5.0") == (26, 5)
    True
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
