"""Jobs of ``squeue --json`` as the watch takes them (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.idle_gpus import NOWHERE, Wanted, queues_for_gpus
from cadenza.policies.core.model import JobState
from cadenza.slurm_plugin.gateway.eligibility import Site, unreadable_reason
from cadenza.slurm_plugin.gateway.slurm_json import NotSlurms, Refused, left_out, read_jobs
from cadenza.slurm_plugin.gateway.slurm_values import Raw, gpus_each, job_gpus, job_state, wanted
from cadenza.slurm_plugin.history.job_records import JobRecord, RecordRow, record_of


@dataclass(frozen=True, slots=True)
class QueueJob:
    """One job that slurmctld knows."""

    record: JobRecord
    """Its times, as accounting will have them; the tasks of an array that wait are one job."""
    state: JobState | None
    """None: it is over."""
    reason: str
    """Slurm's reason for a pending job; empty for none."""
    num_nodes: int
    placement: tuple[tuple[str, int], ...] = ()
    """The nodes that it has, and its GPUs there."""
    priority: int = 1
    barred: frozenset[str] = NOWHERE
    """Nodes that it may not have, by its constraint and its own exclusions."""
    odd_constraint: bool = False
    """Its constraint cannot be judged for each node by itself, so that it may have fewer nodes than it seems."""

    @property
    def waits(self) -> bool:
        """Return True if it would start on free GPUs."""
        return queues_for_gpus(self.state, self.record.gpus, self.priority, self.reason)

    @property
    def wanted(self) -> Wanted:
        """Return where it may start."""
        return Wanted(self.record.partition, self.record.gpu_type, self.barred)


class Queue(NamedTuple):
    """Jobs of an answer, and a sentence on those that cannot be read; empty for none."""

    jobs: tuple[QueueJob, ...]
    note: str = ""


def read_queue(text: str, source: str, site: Site | None = None) -> Queue:
    """Return the jobs of an answer; raise InputError for one that is not squeue's. A bad job costs itself only.

    ``site``: the nodes, for the constraints of jobs.
    """
    try:
        raws, refused = read_jobs(text)
    except NotSlurms as error:
        raise InputError(f"{source}: not the JSON of squeue --json: {error}") from None
    jobs = []
    for raw in raws:
        try:
            jobs.append(_queue_job(raw, source, site))
        except InputError as error:
            refused.append(Refused(f"job {raw['id']}", str(error)))
    said = left_out(refused, "jobs")
    return Queue(tuple(jobs), f"{source}: {said}" if said else "")


def _queue_job(raw: Raw, source: str, site: Site | None) -> QueueJob:
    # 1. Its times: Slurm shows expected ones for a start and an end that have not come. A job that is over and whose
    #    nodes clean up still has its GPUs.
    state = job_state(raw["state"])
    over = state is None or (state == "OTHER" and raw["base_state"] not in ("PENDING", "RUNNING", "SUSPENDED"))
    started = state != "PENDING" and bool(raw["allocated_tres"] or raw["allocated_nodes"])
    start_s = (raw["start_time"] or 0.0) if started else 0.0
    end_s = (raw["end_time"] or 0.0) if over else 0.0
    times = (raw["submit_time"] or 0.0, raw["eligible_time"] or 0.0, start_s, end_s)
    suspend_s = raw["suspend_time"] or 0.0
    suspended_s = max(suspend_s - start_s - (raw["pre_suspension_time"] or 0.0), 0.0) if start_s and suspend_s else 0.0
    row = RecordRow(
        raw["id"], raw["user_name"], raw["partition"], times, suspended_s,
        raw["allocated_tres"] or raw["requested_tres"], job_gpus(raw), "", raw["account"], raw["qos"],
        wanted(raw) or raw["requested_tres"], admin_comment=raw["admin_comment"],
        constraint="&".join(raw["constraints"]), type_told=True,
    )  # fmt: skip
    record = record_of(row, None if raw["time_limit"] is None else 60 * raw["time_limit"], source)
    # 2. Its place: its GPUs on each node, evenly where Slurm does not say.
    nodes, each = raw["allocated_nodes"] if started else [], gpus_each(raw)
    if len(each) != len(nodes):
        each = [-(-record.gpus // max(len(nodes), 1))] * len(nodes)
    # 3. Why it waits, and where it may not start.
    reason = "" if raw["state_reason"] == "None" else raw["state_reason"]
    held = state == "PENDING" and not raw["priority"]
    return QueueJob(
        record, state, "JobHeld" if held and not reason else reason, min(raw["num_nodes"] or 1, 10**6),
        tuple(zip(nodes, each, strict=True)), raw["priority"] or 0,
        site.barred(raw) if site is not None and unreadable_reason(raw) is None else NOWHERE,
        odd_constraint=state == "PENDING" and unreadable_reason(raw) is not None,
    )  # fmt: skip
