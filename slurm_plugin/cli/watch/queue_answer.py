"""Jobs of ``squeue --json`` (pure). Source: https://slurm.schedmd.com/squeue.html, JOB STATE CODES and REASON CODES."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.idle_gpus import WAITS_FOR_GPUS
from cadenza.policies.core.model import JobState
from cadenza.policies.core.text import printable
from cadenza.slurm_plugin.cli.whatif.cluster_nodes import gpus_of
from cadenza.slurm_plugin.cli.whatif.job_records import (
    Count,
    JobRecord,
    RecordRow,
    SlurmNumber,
    Word,
    gpus_in,
    record_of,
    tres_of,
)
from cadenza.slurm_plugin.gateway.slurm_json import counts
from cadenza.slurm_plugin.gateway.translate import job_state

MAX_JOBS = 1_000_000
Text = Annotated[str, msgspec.Meta(max_length=65_536)]


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

    @property
    def waits(self) -> bool:
        """Return True if it would start on free GPUs."""
        return self.state == "PENDING" and self.record.gpus > 0 and self.reason in WAITS_FOR_GPUS


class _Allocated(msgspec.Struct, frozen=True):
    name: Word


class _Nodes(msgspec.Struct, frozen=True):
    allocation: tuple[_Allocated, ...] = ()


class _Resources(msgspec.Struct, frozen=True):
    nodes: _Nodes | None = None


class _Job(msgspec.Struct, frozen=True):
    job_id: Count
    job_state: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1)]
    submit_time: SlurmNumber
    user_name: Word | None = ""
    partition: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    state_reason: Word = ""
    eligible_time: SlurmNumber = SlurmNumber()
    start_time: SlurmNumber = SlurmNumber()
    end_time: SlurmNumber = SlurmNumber()
    suspend_time: SlurmNumber = SlurmNumber()
    pre_sus_time: SlurmNumber = SlurmNumber()
    time_limit: SlurmNumber = SlurmNumber()
    node_count: SlurmNumber = SlurmNumber()
    priority: SlurmNumber = SlurmNumber()
    tres_req_str: Text = ""
    tres_alloc_str: Text = ""
    tres_per_job: Text = ""
    tres_per_node: Text = ""
    tres_per_task: Text = ""
    tasks: SlurmNumber = SlurmNumber()
    account: Word | None = ""
    qos: Word | None = ""
    gres_detail: tuple[Text, ...] = ()
    job_resources: _Resources | None = None


class Queue(NamedTuple):
    """Jobs of an answer, and a sentence on those that cannot be read; empty for none."""

    jobs: tuple[QueueJob, ...]
    note: str = ""


class _Answer(msgspec.Struct, frozen=True):
    jobs: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_JOBS)]


def read_queue(text: str, source: str) -> Queue:
    """Return the jobs of an answer; raise InputError for one that is not squeue's. A bad job costs itself only."""
    try:
        rows = msgspec.json.decode(text, type=_Answer).jobs
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{source}: not the JSON of squeue --json: {error}") from None
    jobs, bad = [], []
    for at, row in enumerate(rows):
        where = f"{source}: jobs[{at}]"
        try:
            jobs.append(_queue_job(msgspec.json.decode(row, type=_Job), where))
        except InputError as error:
            bad.append(str(error))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            bad.append(f"{where}: {error}")
    return Queue(tuple(jobs), f"{len(bad)} jobs cannot be read ({printable(bad[0], 200)})." if bad else "")


def _queue_job(job: _Job, where: str) -> QueueJob:
    # 1. Its state; a job that is over and whose nodes clean up still has its GPUs.
    state = job_state(job.job_state[0])
    over = state is None
    if over and "COMPLETING" in job.job_state:
        state = "OTHER"
    # 2. Its times: Slurm shows expected ones for a start and an end that have not come.
    tres = tres_of(job.tres_alloc_str or job.tres_req_str, f"{where}: tres")
    if not gpus_in(tres):  # without gres/gpu in AccountingStorageTRES Slurm counts none there
        detail = float(sum(map(gpus_of, job.gres_detail)))
        tres |= {"gres/gpu": detail} if detail else _asked(job)
    started = state != "PENDING" and bool(job.tres_alloc_str)
    start_s = (job.start_time.value or 0.0) if started else 0.0
    end_s = (job.end_time.value or 0.0) if over else 0.0
    times = (job.submit_time.value or 0.0, job.eligible_time.value or 0.0, start_s, end_s)
    limit_min, suspend_s = job.time_limit.value, job.suspend_time.value or 0.0
    suspended_s = max(suspend_s - start_s - (job.pre_sus_time.value or 0.0), 0.0) if start_s and suspend_s else 0.0
    row = RecordRow(job.job_id, job.user_name or "", job.partition, times, suspended_s, tres, "",
                    job.account or "", job.qos or "", _asked(job))  # fmt: skip
    record = record_of(row, None if limit_min is None else 60 * limit_min, where)
    # 3. Its place: its GPUs on each node, evenly where Slurm does not say.
    nodes = job.job_resources.nodes.allocation if started and job.job_resources and job.job_resources.nodes else ()
    each = [gpus_of(text) for text in job.gres_detail]
    if len(each) != len(nodes):
        each = [-(-record.gpus // max(len(nodes), 1))] * len(nodes)
    reason = "" if job.state_reason == "None" else job.state_reason
    held = state == "PENDING" and not job.priority.value
    return QueueJob(
        record, state, "JobHeld" if held and not reason else reason, int(min(job.node_count.value or 1, 10**6)) or 1,
        tuple((node.name, gpus) for node, gpus in zip(nodes, each, strict=True)),
        int(min(job.priority.value or 0, 2**32)),
    )  # fmt: skip


def _asked(job: _Job) -> dict[str, float]:
    """Return the GPUs of a job's request by name, with their type where it names one."""
    nodes, tasks = job.node_count.value or 1.0, job.tasks.value or 1.0
    for text, times in ((job.tres_per_job, 1.0), (job.tres_per_node, nodes), (job.tres_per_task, tasks)):
        if found := {name: count * times for name, count in counts(text).items() if name.startswith("gres/gpu")}:
            return found
    return {}
