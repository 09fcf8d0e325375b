"""A cluster's past from its accounting: jobs for a simulation, and the run of them as it was (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from random import Random

from cadenza.policies.core.model import Node
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.inputs.queue_rules import Account, Qos, QueueRules
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.run_values import Counts, JobResult, Result, Sample
from cadenza.slurm_plugin.gateway.eligibility import met, parse
from cadenza.slurm_plugin.history.job_records import JobRecord, JobRecords

NO_GPUS = "without GPUs"
SHORTEST_S = 1.0
"""Shorter runs are no work."""
SAMPLE_SEED = 1
DAY_S = 86_400.0
REQUEUED_S = DAY_S
"""Longest time between the end of a run and the next submission of the same job; Slurm's own is two minutes."""
NO_FEATURES: Mapping[str, frozenset[str]] = {}
ANY_QUEUE = QueueRules()


@dataclass(frozen=True, slots=True)
class PastJob(TraceJob):
    """One job that ran to its end, as a simulation takes it. Times in seconds since the first submission.

    Its work is the sum of its runs, without the time for which it was suspended. Without GPUs it only counts as load.
    """

    start_s: float = 0.0
    """Its first start."""
    end_s: float = 0.0
    """The end of its last run."""
    runs: int = 1


@dataclass(frozen=True, slots=True)
class History:
    """Jobs in order of submission, and the number of those that were left out, by reason."""

    jobs: tuple[PastJob, ...]
    left_out: Counter[str]
    load: tuple[PastJob, ...] = ()
    """Jobs without GPUs that ran on these nodes, in order of submission."""
    load_share: float = 0.0
    """Part of the nodes' CPU time that they had, in the time of the others."""
    cpu_load: float = 0.0
    """The same of the jobs without GPUs that are left out."""
    notes: tuple[str, ...] = ()
    """Sentences on what is not known of the jobs' requests."""
    drawn: str = ""
    """A sentence on the part that was drawn of it; empty for all of it."""

    def consecutive(self, first: int, count: int) -> History:
        """Return jobs that follow each other in order of submission, with times since the first of them."""
        jobs = self.jobs[first : first + count]
        begin_s, end_s = jobs[0].submit_s, max(job.end_s for job in jobs)
        return replace(
            self, jobs=tuple(_later(job, begin_s) for job in jobs), load=tuple(_during(self.load, begin_s, end_s))
        )

    def sample(self, part: float) -> History:
        """Return a part of the jobs, from a stretch of time that is drawn at random, so that they queue as they did."""
        total = len(self.jobs)
        count = max(round(part * total), min(total, 1))
        if count == total:
            return self
        first = Random(SAMPLE_SEED).randrange(total - count + 1)  # noqa: S311 (repeatable draws)
        days = [self.jobs[at].submit_s / DAY_S for at in (first, first + count - 1)]
        drawn = (
            f"{count:,} of {total:,} jobs were drawn: those that follow each other from day {days[0]:.1f} to day "
            f"{days[1]:.1f}, on the whole cluster, which is empty at first."
        )
        return replace(self.consecutive(first, count), drawn=drawn)

    def trace(self, part: float, draw: int = 1, *, by_user: bool = False) -> tuple[TraceJob, ...]:
        """Return the jobs for a simulation; a part of them, drawn at random, keeps checkpoints and can move.

        ``by_user``: instead a part of the users opts in, all of whose jobs do; the others' jobs are Slurm's alone.
        """
        chance = Random(draw)  # noqa: S311 (repeatable draws)
        if by_user:
            users = sorted({job.user for job in self.jobs})
            chosen = set(chance.sample(users, round(part * len(users))))
            return tuple(replace(job, managed=job.user in chosen, checkpoints=job.user in chosen) for job in self.jobs)
        drawn = set(chance.sample(range(len(self.jobs)), round(part * len(self.jobs))))
        return tuple(replace(job, checkpoints=at in drawn) for at, job in enumerate(self.jobs))

    def load_trace(self) -> tuple[TraceJob, ...]:
        """Return the jobs without GPUs for a simulation."""
        return tuple(replace(job, startup_s=0.0) for job in self.load)


def read_history(
    records: JobRecords,
    nodes: Sequence[Node],
    partition: str | None,
    rules: QueueRules = ANY_QUEUE,
    features: Mapping[str, frozenset[str]] = NO_FEATURES,
) -> History:
    """Return the jobs that ended on GPUs which their partition has; the runs of a job that was requeued are one job.

    A job that the rules' limits of today would let wait for ever is left out. ``features``: of each node, by its name.
    """
    # 1. The runs of each job, and what its partition has.
    wishes, sizes = Wishes(nodes, features, records.runs), Sizes(nodes, rules)
    runs = _runs_by_job(records.runs, nodes, partition, rules, wishes)
    whole = [node for node in nodes if node.lane == 0]
    # 2. The jobs that count.
    left_out = Counter(records.left_out)
    found: list[tuple[float, int, list[JobRecord]]] = []
    loads: list[tuple[float, int, list[JobRecord]]] = []
    names = {node.name for node in nodes}
    for job, rows in runs.items():
        last = rows[-1]
        reason = _left_out(rows, sizes, wishes)
        if reason == NO_GPUS and last.cpus and last.nodes and last.nodes <= names and _work_s(rows) >= SHORTEST_S:
            loads.append((rows[0].submit_s, job, rows))
        elif reason:
            left_out[reason] += 1
        else:
            found.append((rows[0].submit_s, job, rows))
    found.sort(key=lambda item: item[:2])
    loads.sort(key=lambda item: item[:2])
    begin_s = found[0][0] if found else 0.0
    jobs = tuple(_past_job(job, rows, begin_s, wishes) for _, job, rows in found)
    # 3. The jobs without GPUs on these nodes, in the time of the others, and those that may have been there.
    span_s, cpus = max((job.end_s for job in jobs), default=0.0), sum(node.cpus for node in whole)
    cpu_s = sum(
        row.cpus * max(min(row.end_s - begin_s, span_s) - max(row.start_s - begin_s, 0.0), 0.0)
        for rows in runs.values()
        for row in rows
        if not row.gpus and (row.partition, "") in sizes.gpus and row.start_s is not None and row.end_s is not None
    )
    load = tuple(_during([_past_job(job, rows, begin_s, wishes) for _, job, rows in loads], 0.0, span_s))
    load_s = sum((job.cpus or 0) * max(min(job.end_s, span_s) - max(job.start_s, 0.0), 0.0) for job in load)
    whole_s = cpus * span_s or inf
    return History(
        jobs, left_out, load, min(load_s / whole_s, 1.0), min(max(cpu_s - load_s, 0.0) / whole_s, 1.0),
        tuple(wishes.notes([rows[-1] for _, _, rows in found])),
    )  # fmt: skip


def _later(job: PastJob, by_s: float) -> PastJob:
    """Return a job on a clock that begins later."""
    return replace(job, submit_s=job.submit_s - by_s, start_s=job.start_s - by_s, end_s=job.end_s - by_s)


def _during(load: Iterable[PastJob], begin_s: float, end_s: float) -> Iterator[PastJob]:
    """Yield the jobs of a stretch of time on its clock; of one that ran at its beginning, the rest."""
    for job in load:
        if job.end_s > begin_s and job.submit_s < end_s:
            work_s = min(job.work_s, job.end_s - begin_s)
            yield _later(replace(job, submit_s=max(job.submit_s, begin_s), work_s=work_s), begin_s)


def _runs_by_job(
    records: Iterable[JobRecord], nodes: Sequence[Node], partition: str | None, rules: QueueRules, wishes: Wishes
) -> dict[int, list[JobRecord]]:
    """Return the runs of each job, with what the nodes and the rules know of its request.

    Slurm's numbers of jobs come again after years: runs that cannot be of one job are of two, under another number.
    """
    # Nodes that were given as a text have no partitions of a site: all jobs are theirs.
    anywhere = any(PARTITION in node.partitions for node in nodes)
    runs: defaultdict[int, list[JobRecord]] = defaultdict(list)
    at_once: dict[str, int] = {}
    for record in records:
        if record.array and record.array_limit:
            at_once[record.array] = record.array_limit
        runs[record.job].append(
            replace(
                record,
                partition=PARTITION if anywhere and partition in (None, record.partition) else record.partition,
                # Slurm takes a type in small and capital letters alike. One that no node has says nothing of these.
                gpu_type=wishes.type_of(record),
                # A license that the rules do not know would never be free.
                licenses=tuple(one for one in record.licenses if one[0] in rules.licenses),
            )
        )
    found: dict[int, list[JobRecord]] = {}
    new = max(runs, default=0) + 1
    for job, rows in runs.items():
        # Answers of times that overlap have a run twice, and the one that was asked first may not know its end.
        rows.sort(key=lambda row: row.end_s or 0.0)
        once = {(row.user, row.start_s, row.start_s is None and row.submit_s): row for row in rows}
        ordered = sorted(once.values(), key=lambda row: (row.submit_s, row.start_s or row.submit_s))
        for at, part in enumerate(_apart(ordered)):
            found[job if not at else new] = [replace(row, array_limit=at_once.get(row.array)) for row in part]
            new += bool(at)
    return found


def _apart(rows: Sequence[JobRecord]) -> Iterator[list[JobRecord]]:
    """Yield the runs of each job among those of one number, in order of submission.

    A requeued job has its user and its account still, and is submitted anew as it ends.
    """
    part: list[JobRecord] = []
    for row in rows:
        last = part[-1] if part else row
        ended_s = max((one.end_s or one.start_s or one.submit_s for one in part), default=row.submit_s)
        if (row.user, row.account) != (last.user, last.account) or row.submit_s - ended_s > REQUEUED_S:
            yield part
            part = []
        part.append(row)
    yield part


class Wishes:
    """The nodes that jobs asked for: by the type of GPU, and by features."""

    def __init__(
        self, nodes: Sequence[Node], features: Mapping[str, frozenset[str]], runs: Sequence[JobRecord]
    ) -> None:
        first = {node.host: node.name for node in nodes if node.lane == 0}
        self.features = {node.name: features[first[node.host]] for node in nodes if first.get(node.host) in features}
        self.types = {node.gpu_type.casefold(): node.gpu_type for node in nodes}
        self.type_on = {node.name: node.gpu_type for node in nodes}
        self.told = any(run.type_kept for run in runs)
        """Some request names its type, so that the accounting keeps types, and one without asked for any."""
        self._barred: dict[tuple[str, bool], frozenset[str] | None] = {}

    def type_of(self, record: JobRecord) -> str:
        """Return the type of GPU that a job may have; "" for any.

        Slurm takes a type in small and capital letters alike. One that no node has says nothing of these.
        """
        asked = self.types.get(record.gpu_type.casefold(), "")
        return asked or ("" if self._known(record) else self._had(record))

    def barred(self, record: JobRecord) -> frozenset[str]:
        """Return the nodes that do not meet a job's constraint; none where it cannot be judged for each node."""
        found = self._judged(record)
        return frozenset() if found is None else found

    def notes(self, jobs: Sequence[JobRecord]) -> Iterator[str]:
        """Yield sentences on what is not known of jobs."""
        if len(self.types.keys() - {""}) > 1:
            silent = [job for job in jobs if not self._known(job)]
            if taken := sum(bool(self._had(job)) for job in silent):
                yield (
                    f"{taken:,} of {len(jobs):,} jobs do not say which type of GPU they asked for "
                    "(AccountingStorageTRES=gres/gpu:TYPE): each has the type that it had."
                )
            if lost := sum(not self._had(job) for job in silent):
                yield f"{lost:,} of {len(jobs):,} jobs neither say nor show a type of GPU: each may have any."
        constrained = [job for job in jobs if job.constraint]
        if constrained and not self.features:
            yield f"{len(constrained):,} jobs have a constraint, and the nodes' features are not known: it is left out."
        elif odd := sum(self._judged(job) is None for job in constrained):
            yield f"{odd:,} jobs have a constraint that binds several nodes together: it is left out."

    def _known(self, record: JobRecord) -> bool:
        return self.told or record.type_known

    def _had(self, record: JobRecord) -> str:
        """Return the type that a job had, by the accounting or by its nodes."""
        kinds = {self.type_on.get(name, "") for name in record.nodes}
        seen = self.types.get(record.had_type.casefold(), "")
        return seen or (next(iter(kinds)) if len(kinds) == 1 else "")

    def _judged(self, record: JobRecord) -> frozenset[str] | None:
        if not record.constraint or not self.features:
            return frozenset()
        asked = record.constraint.replace(",", "&"), len(record.nodes) <= 1
        if asked not in self._barred:
            term = parse(asked[0], one_node=asked[1])
            names = (name for name, own in self.features.items() if term is None or not met(term, own))
            self._barred[asked] = None if term is None else frozenset(names)
        return self._barred[asked]


class Sizes:
    """The most that a job can have: GPUs of a partition and type, memory for each GPU, and limits of its site."""

    def __init__(self, nodes: Sequence[Node], rules: QueueRules) -> None:
        self.rules, self.nodes = rules, [node for node in nodes if node.lane == 0]
        self.gpus = Counter[tuple[str, str]]()
        """By partition and type; the type "" stands for all."""
        self.each_gb = defaultdict[str, float](float)
        for node in nodes:
            for name in node.partitions if node.lane == 0 else ():
                for gpu_type in {"", node.gpu_type}:
                    self.gpus[name, gpu_type] += node.gpus
                self.each_gb[name] = max(self.each_gb[name], node.memory_mb / node.gpus / MB_PER_GB)

    def room(self, partition: str, gpu_type: str, barred: frozenset[str]) -> int:
        """Return the GPUs of a partition and type, without those of nodes that are barred."""
        if not barred:
            return self.gpus[partition, gpu_type]
        here = (node for node in self.nodes if node.name not in barred and partition in node.partitions)
        return sum(node.gpus for node in here if gpu_type in ("", node.gpu_type))

    def over_limit(self, job: JobRecord) -> bool:
        """Return True if a limit of the job's account, QOS or licenses would let it wait for ever."""
        rules = self.rules
        account, qos = rules.accounts.get(job.account, Account()), rules.qos.get(job.qos, Qos())
        most = [limit for limit in (account.gpus, qos.gpus_per_user) if limit is not None]
        short = any(count > rules.licenses.get(name, count) for name, count in job.licenses)
        return account.max_jobs == 0 or short or any(job.gpus > limit for limit in most)


def _left_out(rows: Sequence[JobRecord], sizes: Sizes, wishes: Wishes) -> str:
    """Return the reason for which a job is left out; empty for one that counts."""
    last = rows[-1]
    gpus, each_gb = sizes.gpus, sizes.each_gb[last.partition]
    barred = wishes.barred(last)
    room = sizes.room(last.partition, last.gpu_type, barred)
    each_is_gb = (last.memory_mb or 0.0) / max(last.gpus, 1) / MB_PER_GB
    reasons = (
        (not any((name, "") in gpus for name in last.partition.split(",")), "in other partitions"),
        (last.has_parts, "with parts of GPUs (gres/shard, gres/mps)"),
        (not last.gpus, NO_GPUS),
        (all(row.start_s is None for row in rows), "never started"),
        (last.end_s is None, "not over"),
        (_work_s(rows) < SHORTEST_S, f"ran for less than {SHORTEST_S:.0f} s"),
        (barred and not room, "whose constraint no node meets now"),
        (last.gpus > room, "wider than the cluster"),
        (each_is_gb > each_gb, "with more memory for each GPU than a host has"),
        (sizes.over_limit(last), "over a limit of their account, QOS or licenses"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def _work_s(rows: Sequence[JobRecord]) -> float:
    return sum(
        max(row.end_s - row.start_s - row.suspended_s, 0.0)
        for row in rows
        if row.start_s is not None and row.end_s is not None
    )


def _past_job(job: int, rows: Sequence[JobRecord], begin_s: float, wishes: Wishes) -> PastJob:
    last = rows[-1]
    starts = [row.start_s for row in rows if row.start_s is not None]
    ends = [row.end_s for row in rows if row.end_s is not None]
    memory_gb = None if last.memory_mb is None else last.memory_mb / max(last.gpus, 1) / MB_PER_GB
    return PastJob(
        id=job, submit_s=rows[0].submit_s - begin_s, gpus=last.gpus, work_s=_work_s(rows), user=last.user,
        cpus=last.cpus or None, memory_gb_per_gpu=memory_gb, time_limit_s=last.limit_s, partition=last.partition,
        account=last.account, qos=last.qos, gpu_type=last.gpu_type, nice=last.nice, array=last.array,
        array_limit=last.array_limit, licenses=last.licenses, barred=wishes.barred(last),
        start_s=min(starts) - begin_s, end_s=max(ends) - begin_s, runs=len(starts),
    )  # fmt: skip


# --- As it was -------------------------------------------------------------------------------------------


def as_it_was(history: History, nodes: Sequence[Node]) -> Result:
    """Return the past as the result of a simulation: GPUs count as held from a job's first start to its last end."""
    whole = [node for node in nodes if node.lane == 0]
    jobs = tuple(
        JobResult(
            job.id, job.submit_s, job.start_s, job.end_s, job.gpus, "", job.user, job.work_s, job.work_s, None,
            restarts=job.runs - 1,
        )
        for job in history.jobs
    )  # fmt: skip
    gpus, cpus = sum(node.gpus for node in whole), sum(node.cpus for node in whole)
    return Result(
        jobs, tuple(_samples(history.jobs, gpus)), Counts(restarts=sum(job.runs - 1 for job in history.jobs)), gpus,
        cpus, max((job.end_s for job in history.jobs), default=0.0),
    )  # fmt: skip


def _samples(jobs: Sequence[PastJob], gpus: int) -> Iterator[Sample]:
    """Yield the GPUs held and the jobs that run and wait, at each change."""
    changes: defaultdict[float, list[int]] = defaultdict(lambda: [0, 0, 0])
    for job in jobs:
        for at_s, held, running, waiting in (
            (job.submit_s, 0, 0, 1),
            (job.start_s, job.gpus, 1, -1),
            (job.end_s, -job.gpus, -1, 0),
        ):
            change = changes[at_s]
            change[:] = change[0] + held, change[1] + running, change[2] + waiting
    times = sorted(changes)
    totals = [list(accumulate(changes[at_s][kind] for at_s in times)) for kind in range(3)]
    for at_s, held_gpus, active, queued in zip(times, *totals, strict=True):
        shown = float(min(held_gpus, gpus))
        yield Sample(at_s, shown, 0.0, active, queued, shown)
