"""Loans of CPUs: a lender's iterations with fewer CPUs against those with its own (Gandiva, OSDI'18, §4).

A profile says which CPUs a job does not need, and others have them. A job that is slower then than its profile promises
gets its own back for one measuring window. If it is faster with them, the loan is undone for a while. If not, something
else slows it, such as busy neighbors: it lends again, and the new measurement becomes the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cadenza.policies.allocation.problem import share_speed
from cadenza.policies.core.decision import Loan
from cadenza.policies.core.model import Job, JobKey, StepRate
from cadenza.policies.sharing.state.measurement import MIN_ITERATIONS, Rule
from cadenza.policies.sharing.state.round_state import RoundState

MAX_LOSS = 0.03
"""A job that lends may be slower by this part: less is noise."""
KEEPS_S = 3600.0
"""A loan that was undone, or a measurement with the job's own CPUs, counts so long."""
SETTLING_SHARE = 0.25
"""Part of a window after a change that does not count: what loaders have read ahead."""


def review_cpu_loans(state: RoundState) -> None:
    """Compare jobs that lend CPUs with what they were promised.

    Only where Slurm's allocation is a floor: otherwise jobs are promised their proportional shares, and none lends.
    """
    types = {node.name: node.gpu_type for node in state.snapshot.nodes}
    window_s = Rule.under(state.settings, state.gandiva).window_s
    lending = LoanReview(state.now_s, window_s, types).look(state.jobs.ours, state.memory.sharing.loans)
    for key, reason in lending.keeps.items():
        state.outcome.say("cpus", key, reason)
    state.how_big.keeps_cpus = frozenset(lending.keeps)
    state.remember(loans=lending.loans)


@dataclass(frozen=True, slots=True)
class LoanFindings:
    """All loans after this round's review."""

    loans: tuple[Loan, ...] = ()
    """In order of keys."""
    keeps: Mapping[JobKey, str] = field(default_factory=dict)
    """Why a job has its own CPUs now and must not lend, by job."""


@dataclass(frozen=True, slots=True)
class LoanReview:
    """Review of loans at one time; seconds."""

    now_s: float
    window_s: float
    types: Mapping[str, str]
    """GPU type of each node, by name."""

    def look(self, jobs: Mapping[JobKey, Job], loans: tuple[Loan, ...]) -> LoanFindings:
        """Return the loans of these jobs as of now."""
        existing = {loan.job: loan for loan in loans}
        reviewed = tuple(sorted(self._followed(jobs, existing)))
        return LoanFindings(
            reviewed, {loan.job: _reason(loan, jobs[loan.job]) for loan in reviewed if loan.phase != "lends"}
        )

    def _followed(self, jobs: Mapping[JobKey, Job], existing: Mapping[JobKey, Loan]) -> Iterator[Loan]:
        for key, job in jobs.items():
            pace = _pace(job)
            loan = existing.get(key)
            if pace is None or (loan is None and not _lends(job)):
                if loan is not None:
                    yield loan
                continue
            yield self._next(self._marked(loan or Loan(key), job, pace), job, pace)

    def _marked(self, loan: Loan, job: Job, pace: StepRate) -> Loan:
        """Return a loan whose stretch is of the CPUs that the job has now, begun anew where that has to be."""
        cpus = job.placement[0].cpus
        if loan.cpus != cpus:
            return _from(loan._replace(cpus=cpus, since_s=self.now_s), pace)
        again = pace.iterations < loan.iterations or pace.window_s < loan.window_s
        return _from(loan, pace) if again or self.now_s - loan.since_s < SETTLING_SHARE * self.window_s else loan

    def _next(self, loan: Loan, job: Job, pace: StepRate) -> Loan:
        """Return a loan after what its stretch has shown."""
        if loan.judged_s and self.now_s - loan.judged_s > KEEPS_S:
            return _from(loan._replace(phase="lends", own_s=0.0, judged_s=0.0), pace)
        iteration_s = self._measured(loan, pace)
        if iteration_s is None:
            return loan
        if loan.phase == "lends":
            return _from(self._lent(loan, job, iteration_s), pace) if _lends(job) else loan
        if loan.phase != "checks" or _lends(job):
            return loan
        costs = loan.lent_s > iteration_s * (1 + MAX_LOSS)
        return loan._replace(own_s=iteration_s, judged_s=self.now_s, phase="keeps" if costs else "lends")

    def _measured(self, loan: Loan, pace: StepRate) -> float | None:
        """Return the mean iteration time of the stretch, None while it is too short."""
        iterations, window_s = pace.iterations - loan.iterations, pace.window_s - loan.window_s
        if iterations < MIN_ITERATIONS or window_s < self.window_s:
            return None
        return (pace.iterations * pace.iteration_s - loan.spent_s) / iterations

    def _lent(self, loan: Loan, job: Job, iteration_s: float) -> Loan:
        promised_s = loan.own_s or self._promised_s(job)
        if not promised_s:
            return loan
        slow = iteration_s > promised_s * (1 + MAX_LOSS)
        return loan._replace(lent_s=iteration_s, own_s=promised_s, phase="checks" if slow else "lends")

    def _promised_s(self, job: Job) -> float:
        """Return an iteration's time with what the job asked for, as its profile says; 0 without one."""
        if job.profile is None:
            return 0.0
        here = job.placement[0]
        gpu = self.types.get(here.node, "")
        asked = here._replace(cpus=max(job.cpus, 1), memory_mb=max(job.memory_mb, 1))
        speed = share_speed(job.profile, asked, gpu)
        return job.profile.on(gpu).iteration_s / speed if speed > 0 else 0.0


def _pace(job: Job) -> StepRate | None:
    """Return the pace of a job that has GPUs of one node to itself, None for any other."""
    lease = job.lease
    if lease is None or lease.state != "held" or lease.pace is None or lease.pace.co_runners or len(job.placement) != 1:
        return None
    return lease.pace if lease.pace.iterations else None


def _lends(job: Job) -> bool:
    return len(job.placement) == 1 and job.placement[0].cpus < job.cpus


def _from(loan: Loan, pace: StepRate) -> Loan:
    """Return a loan whose stretch begins at this pace."""
    return loan._replace(iterations=pace.iterations, spent_s=pace.iterations * pace.iteration_s, window_s=pace.window_s)


def _reason(loan: Loan, job: Job) -> str:
    lent, own = f"{loan.lent_s * 1000:.3g} ms an iteration", f"{loan.own_s * 1000:.3g}"
    if loan.phase == "checks":
        return f"has its {job.cpus} CPUs back to see whether lending slows it: {lent}, {own} promised"
    return f"keeps its {job.cpus} CPUs, because lending slowed it: {lent}, {own} with its own"
