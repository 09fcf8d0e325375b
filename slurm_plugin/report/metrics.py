"""The figures of the comparison table: what each means, in which unit it is saved, and which way is better."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from cadenza.slurm_plugin.report.units import HOUR_S

Kind: TypeAlias = Literal["time", "part", "count", "ms"]
Better: TypeAlias = Literal["lower", "higher", ""]


class Metric(NamedTuple):
    """One row of the table; ``key`` as in the file, ``better`` is "" where neither way is."""

    key: str
    name: str
    section: str
    kind: Kind
    better: Better
    explain: str

    @property
    def seconds(self) -> float:
        """Return how many seconds the file's unit of time has."""
        return HOUR_S if self.key.endswith("_h") else 1.0


JOBS, CLUSTER, POLICY = "Completion", "Cluster", "What the policy did"
METRICS = (
    Metric("jobs", "Jobs", JOBS, "count", "", "that ended; their completion times are counted"),
    Metric("unfinished", "Not finished", JOBS, "count", "lower", "jobs that had not ended when the simulation did"),
    Metric("avg_jct_h", "Mean JCT", JOBS, "time", "lower", "job completion time: from submission to the end"),
    Metric("p50_jct_h", "Median JCT", JOBS, "time", "lower", "half of the jobs end sooner than this"),
    Metric("p99_jct_h", "p99 JCT", JOBS, "time", "lower", "99 of 100 jobs end sooner than this"),
    Metric("makespan_h", "Makespan", JOBS, "time", "lower", "when the last job ended"),
    Metric("time_to_100_iterations_s", "Time to 100 iterations", JOBS, "time", "lower",
           "from submission to the end of the hundredth training step, median"),
    Metric("gpu_utilization", "GPUs held", CLUSTER, "part", "", "share of the GPU time in which a job has it"),
    Metric("gpu_busy", "GPUs busy", CLUSTER, "part", "", "share of the GPU time in which it computes"),
    Metric("cpu_utilization", "CPUs allocated", CLUSTER, "part", "", "share of the CPU time that is given to jobs"),
    Metric("yields", "Yields", POLICY, "count", "", "a job gives up its GPUs, its state waits in host memory"),
    Metric("migrations", "Migrations", POLICY, "count", "", "a job continues on other GPUs"),
    Metric("restarts", "Restarts", POLICY, "count", "", "a job starts again from its checkpoint"),
    Metric("resizes", "Resizes", POLICY, "count", "", "a job continues on another number of GPUs"),
    Metric("packs", "Packs", POLICY, "count", "", "two jobs begin to run on one GPU at once"),
    Metric("unpacks", "Unpacks", POLICY, "count", "", "they stop doing so"),
    Metric("tunes", "Tunes", POLICY, "count", "", "a running job gets other CPUs or memory"),
    Metric("decisions", "Decisions", POLICY, "count", "", "rounds in which the policy was asked"),
    Metric("decision_p50_ms", "Decision, median", POLICY, "ms", "", "wall time of one decision"),
    Metric("decision_p99_ms", "Decision, p99", POLICY, "ms", "", "99 of 100 decisions are faster"),
    Metric("decision_max_ms", "Decision, longest", POLICY, "ms", "", "wall time of the slowest one"),
)  # fmt: skip
OPTIONAL = frozenset({"unfinished", "restarts", "resizes", "packs", "unpacks"})
"""Rows that are left out where they are 0 everywhere; as is every row that nothing is known about."""
