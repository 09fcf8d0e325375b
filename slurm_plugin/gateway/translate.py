"""Translation of the worker's answers into the model of the policies: pure functions over plain dicts."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node, Options, SiteRules, SlurmState, changed
from cadenza.policies.core.text import printable
from cadenza.slurm_plugin.gateway.comment import BadOptions, opt_in_of
from cadenza.slurm_plugin.gateway.eligibility import Site, unreadable_reason
from cadenza.slurm_plugin.gateway.slurm_values import (
    Raw,
    gpu_count,
    gpu_type,
    job_gpus,
    job_state,
    node_gpus_used,
    node_state,
    wanted_type,
)

_STARTING = frozenset({"CONFIGURING", "POWER_UP_NODE"})
SLURMS_DRAINS = (
    "Prolog error",
    "Epilog error",
    "Duplicate jobid",
    "Kill task failed",
    "batch job complete failure",
)
"""Beginnings of the reasons with which slurmctld and slurmd drain a node by themselves."""
STARTED_TWICE = "Duplicate jobid"
"""The one of them that has no other cause than Slurm itself: it starts a job where slurmd still runs it."""
EMPTIES, RESERVES = "cadenza host: ", "cadenza_"
"""Beginnings of the reason and of the reservation by which ``cadenza host`` says that jobs are to leave a node."""
LAUNCH_FAILED = "launch failed requeued held"
"""slurmctld's reason of a job that it requeued into a hold by itself."""
PROLOG_S = 10.0
"""Time after the start of a slurmd from which on it would have reported a prolog of the slurmd before it."""
RESTART_S = 60.0
"""Time between a restart of slurmctld or slurmd and what it has done to jobs and nodes because of it, at most."""
MAX_COMMAND, MAX_PARTITIONS = 4096, 4096
"""Characters that are kept of a command, and of a list of partitions."""
_LANE_FEATURE = re.compile(r"lane(\d+)")
_LANE_SUFFIX = re.compile(r"(?P<host>.+)-l(?P<lane>\d+)")


class Known(NamedTuple):
    """Records of the answer before with what they were translated to: one that has not changed keeps its object."""

    jobs: dict[int, tuple[Raw, Job]]
    nodes: dict[str, tuple[tuple[object, ...], Node]]


def snapshot(raw: Raw, known: Known | None = None) -> ClusterSnapshot:
    """Return the cluster of one answer of the worker: nodes, and jobs that are not finished; no leases.

    A job that slurmctld calls failed because of a stop that it ordered before it was killed is shown as ending.
    ``known``: of the answer before; it becomes that of this one.
    """
    known = known if known is not None else Known({}, {})
    started_s = raw.get("slurmctld_start_time")
    twice_s = [float(one["reason_time"]) for one in raw["nodes"] if one.get("reason_time") and started_twice(one)]
    found = nodes(raw["nodes"], started_s, known.nodes)
    site, now_s = Site.of(raw, found), float(raw["time_s"])
    jobs: list[tuple[Raw, Job]] = []
    for record in raw["jobs"]:
        kept = known.jobs.get(record["id"])
        one = _as_before(*kept, record, now_s, site) if kept is not None else None
        if one is None:
            one = job(record, now_s, started_s, twice_s, site)
        if one is not None:
            jobs.append((record, one))
    known.jobs.clear()
    known.jobs.update((one[1].key.id, one) for one in jobs)
    ending = ending_s(raw["jobs"], float(raw["time_s"]))
    empty = empty_from_s(raw)
    lost = prologs_lost(raw)
    rules = raw.get("site", {})
    return ClusterSnapshot(
        time_s=float(raw["time_s"]),
        nodes=tuple(
            replace(one, ending_s=ending.get(one.name, 0.0), empty_from_s=empty.get(one.name))
            if one.name in ending or one.name in empty
            else one
            for one in found
        ),
        jobs=tuple(
            sorted(
                (replace(one, prolog_lost=True) if one.key.id in lost else one for _, one in jobs),
                key=attrgetter("key"),
            )
        ),
        site=SiteRules(**{**rules, "unread": tuple(rules.get("unread", ()))}),
    )


def _as_before(before: Raw, one: Job, record: Raw, now_s: float, site: Site) -> Job | None:
    """Return a job whose record has not changed, but for the time that it has run; None if it must be translated."""
    # What an end and a hold mean depends on slurmctld's start, which is no part of the record.
    if (record is not before and record != before) or one.state == "OTHER" or one.held:
        return None
    # A reservation that comes, begins or ends changes the nodes of a job whose own record stays the same.
    if (one.options is not None or (one.state == "PENDING" and one.gpus)) and site.barred(record) != one.barred:
        return None
    return changed(one, run_s=run_s(record, now_s)) if one.state == "RUNNING" else one


# --- Jobs ----------------------------------------------------------------------------------------------


def job(
    raw: Raw,
    now_s: float,
    slurmctld_start_s: float | None = None,
    twice_s: Collection[float] = (),
    site: Site | None = None,
) -> Job | None:
    """Return one job, or None when it is finished. CPUs, GPUs and memory are totals over the job's nodes.

    ``twice_s``: the times at which Slurm drained nodes where it had started a job twice; ``site``: what bars jobs from
    nodes.
    """
    ended_s = terminated_s(raw, slurmctld_start_s, now_s)
    state = job_state(raw["state"]) if ended_s is None else "OTHER"
    if state is None:
        return None
    options, unmanageable = options_of(raw)
    gpus = job_gpus(raw)
    return Job(
        key=JobKey(raw["id"], raw["requeue_count"] or 0),
        user=printable(raw["user_name"] or ""),
        account=printable(raw["account"] or ""),
        partition=printable(raw["partition"] or "", MAX_PARTITIONS),
        qos=printable(raw["qos"] or ""),
        state=state,
        gpus=gpus,
        cpus=raw["cpus"] or 0,
        memory_mb=job_memory_mb(raw),
        num_nodes=raw["num_nodes"] or 1,
        submit_s=float(raw["submit_time"] or 0),
        name=printable(raw["name"] or ""),
        state_reason="" if raw["state_reason"] in {None, "None"} else printable(raw["state_reason"]),
        # Until a job runs this is Slurm's forecast, which each pass of backfill may change.
        start_s=float(raw["start_time"]) if state != "PENDING" and raw["start_time"] else None,
        run_s=run_s(raw, now_s) if state != "PENDING" else None,
        suspended_s=float(raw["suspend_time"]) if state == "SUSPENDED" and raw["suspend_time"] else None,
        time_limit_s=60.0 * raw["time_limit"] if raw.get("time_limit") else None,
        command=printable(raw.get("command") or "", MAX_COMMAND),
        tasks=raw["ntasks"] or 1,
        slurm_priority=raw["priority"] or 0,
        eligible_s=float(raw["eligible_time"]) if state == "PENDING" and raw.get("eligible_time") else None,
        nodes=tuple(raw["allocated_nodes"]) if state != "PENDING" and ended_s is None else (),
        required_nodes=tuple(raw["required_nodes"]),
        barred=site.barred(raw)
        if site is not None and (options is not None or (state == "PENDING" and gpus))
        else frozenset(),
        held_at_restart=state == "PENDING" and held_at_restart(raw, slurmctld_start_s, twice_s),
        gpu_type=wanted_type(raw),
        starting=raw["state"] in _STARTING,
        options=options,
        unmanageable=unmanageable,
        # Slurm requeues batch jobs only: it has no script of others to start again.
        requeueable=bool(raw["is_requeueable"] and raw["is_batch_job"]),
        terminated_s=ended_s,
    )


def slurm_state_of(raw: Raw) -> tuple[JobKey, SlurmState] | None:
    """Return a job's incarnation and state with Slurm from one short look; None when it is finished."""
    state = job_state(raw["state"])
    if state is None:
        return None
    pending = state == "PENDING"
    eligible = not pending or (raw["eligible_time"] or 0) <= raw["time_s"]
    return JobKey(raw["id"], raw["restart"] or 0), SlurmState(state, pending and not raw["priority"], eligible)


def run_s(raw: Raw, now_s: float) -> float | None:
    """Return the run time of a started job without suspends, seconds, as squeue(1) counts its TIME."""
    if raw["state"] == "SUSPENDED":
        return float(raw["pre_suspension_time"] or 0)
    since = raw["suspend_time"] or raw["start_time"]  # the former is when it was last suspended or resumed
    return float(raw["pre_suspension_time"] or 0) + max(now_s - since, 0.0) if since else None


def options_of(raw: Raw) -> tuple[Options | None, str]:
    """Return the user's options, and the reason for which the job must be left alone all the same, else ""."""
    if "comment" in raw.get("unreadable", ()):
        return None, "the comment is not UTF-8"
    try:
        opt_in = opt_in_of(raw["comment"])
    except BadOptions as error:
        return None, str(error)
    return (None, "") if opt_in is None else (opt_in.options, opt_in.reason or unmanageable_reason(raw) or "")


def terminated_s(raw: Raw, slurmctld_start_s: float | None, now_s: float) -> float | None:
    """Return when Slurm called a job failed by SIGTERM, less than ``RESTART_S`` after slurmctld's start and ago."""
    # A slurmctld that is killed forgets that it has requeued a job. The job's script ends by the requeue's SIGTERM, and
    # the next slurmctld takes that for a failure. A job that its owner cancels is CANCELLED instead.
    ended_s, stopped = raw.get("end_time"), raw["state"] == "FAILED" and raw.get("exit_code_signal") == signal.SIGTERM
    if not stopped or not ended_s or slurmctld_start_s is None or not (raw["is_requeueable"] and raw["is_batch_job"]):
        return None
    recent = 0 <= ended_s - int(slurmctld_start_s) <= RESTART_S and now_s - ended_s <= RESTART_S
    return float(ended_s) if recent else None


def held_at_restart(raw: Raw, slurmctld_start_s: float | None, twice_s: Collection[float] = ()) -> bool:
    """Return True if Slurm itself holds a job within ``RESTART_S`` of slurmctld's start, and never releases it."""
    if raw["priority"]:
        return False
    # A slurmctld that was killed forgets that it has started a job, starts it again, is refused by slurmd ("Duplicate
    # jobid"), and requeues the job into a hold.
    started_s = -inf if slurmctld_start_s is None else slurmctld_start_s
    # A requeue sets the time of submission anew.
    requeued_s = float(raw["submit_time"] or 0)
    failed = raw["state_reason"] == LAUNCH_FAILED
    # Without a restart Slurm does the same to a job that it requeued because its node did not answer: it starts the job
    # there as soon as the node answers again, before slurmd knows. The time of that node's drain is the witness.
    return failed and any(abs(requeued_s - at_s) <= RESTART_S for at_s in (started_s, *twice_s))


def unmanageable_reason(raw: Raw) -> str | None:
    """Return the reason for which Slurm or we cannot steer a job of this kind; None if there is none."""
    exclusive = {"NO": "--exclusive", "USER": "--exclusive=user", "MCS": "--exclusive=mcs"}
    sharing = raw["resource_sharing"]
    checks = (
        (raw["heterogeneous_id"], "a heterogeneous job can be suspended only as a whole"),
        (raw["is_cronjob"], "Slurm refuses every change of a cron job (scrontab)"),
        (sharing in exclusive, f"{exclusive.get(sharing)} keeps other jobs off its nodes"),
        ("," in (raw["partition"] or ""), "it waits in several partitions; it can be shared once it runs in one"),
        (job_gpus(raw) == 0, "it has no GPUs that Slurm reports; AccountingStorageTRES must list gres/gpu"),
    )
    return next((reason for applies, reason in checks if applies), None) or unreadable_reason(raw)


def job_memory_mb(raw: Raw) -> int:
    """Return a job's memory in MB over all its nodes; 0 while it waits for whole nodes (``--mem=0``)."""
    for name in ("allocated_tres", "requested_tres"):
        memory_mb = (raw.get(name) or {}).get("mem")
        if memory_mb:
            return int(memory_mb)
    return int(raw["memory"] or 0)


# --- Nodes ---------------------------------------------------------------------------------------------


def nodes(
    raws: Sequence[Raw],
    slurmctld_start_s: float | None = None,
    known: dict[str, tuple[tuple[object, ...], Node]] | None = None,
) -> tuple[Node, ...]:
    """Return all nodes by name, each with its host and lane; slurmctld's start is read where a node is drained.

    ``known``: as of ``Known``.
    """
    known = known if known is not None else {}
    lanes = {raw["name"]: lane_of(raw) for raw in raws}
    emulated = Counter(raw["hostname"] for raw in raws if lanes[raw["name"]] == 0)
    found: list[tuple[tuple[object, ...], Node]] = []
    for raw in raws:
        name = raw["name"]
        source = raw, host_of(raw, emulated), lanes[name], drained_at_restart(raw, slurmctld_start_s)
        kept = known.get(name)
        if kept is None or kept[0] != source:
            kept = source, replace(node(*source[:3]), drained_at_restart=source[3])
        found.append(kept)
    known.clear()
    known.update((one[1].name, one) for one in found)
    return tuple(sorted((one for _, one in found), key=attrgetter("name")))


def lane_of(raw: Raw) -> int:
    """Return a node's lane: its feature ``laneK``, else its name's ending ``-lK``, else 0."""
    features = (_LANE_FEATURE.fullmatch(name) for name in raw["available_features"])
    named = next((int(match[1]) for match in features if match), None)
    if named is not None:
        return named
    suffix = _LANE_SUFFIX.fullmatch(raw["name"])
    return int(suffix["lane"]) if suffix and suffix["host"] == raw["hostname"] else 0


def host_of(raw: Raw, first_lanes: Mapping[str, int]) -> str:
    """Return the host of a node: its NodeHostname, which lanes share."""
    # Where several nodes of lane 0 have one NodeHostname, one machine emulates many nodes, and their names count.
    if first_lanes.get(raw["hostname"], 0) <= 1:
        return str(raw["hostname"] or raw["name"])
    suffix = _LANE_SUFFIX.fullmatch(raw["name"])
    return suffix["host"] if suffix else str(raw["name"])


def prologs_lost(raw: Raw) -> frozenset[int]:
    """Return the jobs whose prolog Slurm waits for although the slurmd that ran it is gone, by id."""
    # With PrologFlags=Alloc slurmctld launches a job once each slurmd has reported the end of its prolog
    # (slurm.conf(5)). A slurmd that was killed before never does, and the next slurmd does not know of the prolog.
    started_s = {node["name"]: node.get("slurmd_start_time") or 0 for node in raw["nodes"]}
    oldest_s = float(raw["time_s"]) - PROLOG_S
    return frozenset(
        job["id"]
        for job in raw["jobs"]
        if job["state"] == "RUNNING" and job["state_reason"] == "Prolog" and job["start_time"]
        for name in job["allocated_nodes"]
        if job["start_time"] < started_s.get(name, 0) <= oldest_s
    )


def ending_s(raws: Sequence[Raw], now_s: float) -> dict[str, float]:
    """Return how long jobs have been ending on each node where some are, the longest of several, in seconds."""
    found: dict[str, float] = {}
    for raw in raws:
        # Slurm sets a job's end time as the end begins, and calls the job COMPLETING until the last of its nodes has
        # cleaned up (scontrol(1), EndTime; squeue(1), JOB STATE CODES).
        if raw.get("end_time") and job_state(raw["state"]) == "OTHER":
            since_s = max(now_s - raw["end_time"], 0.0)
            found |= {name: max(since_s, found.get(name, 0.0)) for name in raw["allocated_nodes"]}
    return found


def empty_from_s(raw: Raw) -> dict[str, float]:
    """Return from when on ``cadenza host`` wants each node without jobs, for those where it does; 0: now."""
    found: dict[str, float] = {}
    for one in raw.get("reservations", ()):
        if one["name"].startswith(RESERVES):
            found |= dict.fromkeys(one["nodes"], float(one["start_time"] or 0))
    drained = (node for node in raw["nodes"] if "DRAIN" in node["state"])
    return found | {node["name"]: 0.0 for node in drained if (node["reason"] or "").startswith(EMPTIES)}


def drained_at_restart(raw: Raw, slurmctld_start_s: float | None) -> bool:
    """Return True if a node's drain is Slurm's own, within ``RESTART_S`` of a start of slurmctld or of its slurmd."""
    # A job that was started twice is Slurm's own doing at any time: also a network that was cut leads to it.
    if started_twice(raw):
        return True
    drained_s = raw.get("reason_time")
    if "DRAIN" not in raw["state"] or drained_s is None or not (raw["reason"] or "").startswith(SLURMS_DRAINS):
        return False
    # A slurmctld that was killed forgets its last seconds and may start a job twice. A slurmd that was killed may fail
    # a start or an end. Slurm then drains the node and leaves it so.
    starts = (slurmctld_start_s, raw.get("slurmd_start_time"))
    return any(start_s is not None and abs(drained_s - start_s) <= RESTART_S for start_s in starts)


def started_twice(raw: Raw) -> bool:
    """Return True if Slurm drained a node because it had started a job there that slurmd still ran."""
    return "DRAIN" in raw["state"] and (raw["reason"] or "").startswith(STARTED_TWICE)


def node(raw: Raw, host: str, lane: int) -> Node:
    """Return one node; ``up`` means that slurmctld would start jobs on it if it were not drained."""
    base, *flags = raw["state"].split("+")
    gres, state = raw["configured_gres"] or {}, node_state((base, *flags))
    return Node(
        name=raw["name"],
        host=host,
        lane=lane,
        # Slurm gives jobs no CPUs that the site sets aside (CoreSpecCount, CpuSpecList).
        cpus=raw["effective_cpus"] or raw["total_cpus"] or 0,
        memory_mb=raw["real_memory"] or 0,
        gpus=gpu_count(gres),
        gpu_type=gpu_type(gres),
        partitions=tuple(sorted(raw["partitions"] or ())),
        up=state == "up",
        asleep=state == "asleep",
        drained="DRAIN" in flags,
        drain_reason=printable(raw["reason"] or "") if "DRAIN" in flags else "",
        weight=raw.get("weight") or 0,
        cpus_used=raw["allocated_cpus"] or 0,
        memory_used_mb=raw["allocated_memory"] or 0,
        gpus_used=node_gpus_used(raw),
    )
