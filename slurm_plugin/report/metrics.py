"""Figures of the comparison table: name, meaning, unit and better direction."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from cadenza.slurm_plugin.report.units import HOUR_S

Kind: TypeAlias = Literal["time", "part", "count", "ms"]
Better: TypeAlias = Literal["lower", "higher", ""]


class Metric(NamedTuple):
    """One row of the table; ``key`` as in the file, ``better`` is "" if neither direction is better."""

    key: str
    name: str
    section: str
    kind: Kind
    better: Better
    explain: str

    @property
    def seconds(self) -> float:
        """Return the seconds in the file's unit of time."""
        return HOUR_S if self.key.endswith("_h") else 1.0


JOBS, CLUSTER, POLICY = "Completion", "Cluster", "Actions of the policy"
METRICS = (
    Metric("jobs", "Jobs", JOBS, "count", "", "that ended; the completion times cover these"),
    Metric("unfinished", "Not finished", JOBS, "count", "lower", "jobs that were still running or waiting at the end"),
    Metric("avg_jct_h", "Mean JCT", JOBS, "time", "lower", "job completion time: from submission to the end"),
    Metric("p50_jct_h", "Median JCT", JOBS, "time", "lower", "half of the jobs end sooner"),
    Metric("p99_jct_h", "p99 JCT", JOBS, "time", "lower", "99 of 100 jobs end sooner"),
    Metric("mean_bounded_slowdown", "Bounded slowdown", JOBS, "count", "lower",
           "mean of completion time over the larger of run time and 60 s"),
    Metric("wait_1_gpu_h", "Wait, 1 GPU", JOBS, "time", "lower", "mean, from submission to the first start"),
    Metric("wait_2_to_7_gpus_h", "Wait, 2 to 7 GPUs", JOBS, "time", "lower", "the same"),
    Metric("wait_8_gpus_h", "Wait, 8 GPUs", JOBS, "time", "lower", "the same"),
    Metric("wait_more_gpus_h", "Wait, more GPUs", JOBS, "time", "lower", "the same"),
    Metric("makespan_h", "Makespan", JOBS, "time", "lower", "time of the last job's end"),
    Metric("time_to_100_iterations_s", "Time to 100 iterations", JOBS, "time", "lower",
           "median time from submission to the end of training step 100"),
    Metric("gpu_utilization", "GPUs held", CLUSTER, "part", "", "fraction of the GPU time that jobs hold"),
    Metric("gpu_busy", "GPUs busy", CLUSTER, "part", "", "fraction of the GPU time that jobs compute"),
    Metric("idle_waiting_gpus", "GPUs idle while jobs wait", CLUSTER, "count", "lower",
           "mean number of GPUs without a job while one waits that fits there"),
    Metric("cpu_utilization", "CPUs allocated", CLUSTER, "part", "", "fraction of the CPU time that jobs hold"),
    Metric("yields", "Yields", POLICY, "count", "", "a job leaves its GPUs; its state waits in host memory"),
    Metric("migrations", "Migrations", POLICY, "count", "", "a job continues on other GPUs"),
    Metric("restarts", "Restarts", POLICY, "count", "", "a job starts again from its checkpoint"),
    Metric("resizes", "Resizes", POLICY, "count", "", "a job continues on another number of GPUs"),
    Metric("packs", "Packs", POLICY, "count", "", "two jobs start to run on one GPU at once"),
    Metric("unpacks", "Unpacks", POLICY, "count", "", "they stop"),
    Metric("tunes", "Tunes", POLICY, "count", "", "a running job gets other CPUs or memory"),
    Metric("decisions", "Decisions", POLICY, "count", "", "rounds with a decision"),
    Metric("decision_p50_ms", "Decision, median", POLICY, "ms", "", "wall time of one decision"),
    Metric("decision_p99_ms", "Decision, p99", POLICY, "ms", "", "99 of 100 decisions are faster"),
    Metric("decision_max_ms", "Decision, longest", POLICY, "ms", "", "wall time of the slowest decision"),
)  # fmt: skip
OPTIONAL = frozenset({"unfinished", "restarts", "resizes", "packs", "unpacks"})
"""Rows that are left out if all values are 0."""
LEAST_BASE, LEAST_BASE_GPUS = 0.01, 0.5
"""Least wait to compare with, as a part of the mean completion time, and least number of idle GPUs."""


def comparable(key: str, base: float, mean_jct_h: float | None) -> bool:
    """Return True if a ratio to this figure tells something: 74,412 times next to nothing does not.

    >>> comparable("wait_1_gpu_h", 0.01, 20.0), comparable("avg_jct_h", 0.01, 0.01)
    (False, True)
    """
    if key == "idle_waiting_gpus":
        return base >= LEAST_BASE_GPUS
    if key.startswith("wait_") or key.endswith("time_to_100_iterations_s"):
        base_h = base / HOUR_S if key.endswith("_s") else base
        return base_h > 0 and base_h >= LEAST_BASE * (mean_jct_h or 0.0)
    return base != 0
