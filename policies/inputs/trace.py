"""Job traces: a CSV file of ``job,submit_s,gpus`` and ``model``, ``iterations`` or ``duration_s``, one row a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.profile import MB_PER_GB, Profile
from cadenza.policies.inputs.cluster import MAX_GPUS, PARTITION
from cadenza.policies.inputs.csv_table import (
    MAX_QUANTITY,
    Table,
    integer,
    number,
    positive,
    quoted,
    read_table,
    suggest,
)
from cadenza.policies.inputs.model_mix import ModelMix
from cadenza.policies.inputs.queue_rules import QueueRules

REQUIRED = ("job", "submit_s", "gpus")
LENGTHS = ("iterations", "duration_s")
MORE = (
    "user", "account", "share", "qos", "tier", "nice", "min_gpus", "max_gpus", "memory_gb_per_gpu", "time_limit_s",
    "checkpoints", "managed", "gpu_type", "array", "array_limit", "license",
)  # fmt: skip
OPTIONAL = ("model", *LENGTHS, *MORE)
YES_NO = {"yes": True, "no": False}
SITE = "name it in the file of --site"
LATEST_S = 1e11
"""About 3,000 years; a later time is a mistake."""
MAX_JOB_GPUS = 100 * MAX_GPUS
WHOLE = {"nice": (-(2**31 - 3), 2**31 - 3), "tier": (1, 65_535), "array_limit": (1, 10**9)}
NUMBERS = {"memory_gb_per_gpu": MAX_QUANTITY, "time_limit_s": LATEST_S, "share": 1e9}
"""Columns of whole numbers with their bounds, and of numbers with their largest."""
PLAIN_QUEUE = QueueRules()
ID_BITS = 63
USUAL_DIGITS, USUAL_SECONDS = 15, 10
"""Digits of whole numbers and times that need no further check."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a workload; times in seconds since the start."""

    id: int
    submit_s: float
    gpus: int
    work_s: float
    """Run time at the proportional share."""
    model: str = ""
    profile: Profile | None = None
    """As the policy sees it, from the profiles given."""
    truth: Profile | None = None
    """As the job really behaves, where that differs; None: as its profile."""
    iterations: int | None = None
    user: str = "user"
    account: str = ""
    priority: int = 0
    """The job's own option, which counts up to a site's ``max_priority``; no column of a trace."""
    min_gpus: int | None = None
    max_gpus: int | None = None
    startup_s: float | None = None
    """Time from start to first iteration; None: the costs' ``start_s``."""
    cpus: int | None = None
    """CPUs that its user asks for, on all its nodes; None: in proportion to its GPUs."""
    memory_gb_per_gpu: float | None = None
    """Memory that its user asks for; None: in proportion to its GPUs. All the memory of a job without GPUs."""
    time_limit_s: float | None = None
    """Time limit that its user asks for; None: not said. Backfill plans with it, and it ends no simulated job."""
    checkpoints: bool = True
    """True if the job keeps checkpoints, so that it can move and a requeue loses a part of its work only."""
    boasts: bool = False
    """True if it says that it keeps checkpoints and keeps none; no column of a trace."""
    partition: str = PARTITION
    """The job runs on nodes of this partition only."""
    managed: bool = True
    """True if the job opted in; else Slurm alone starts it, and it never moves."""
    share: float | None = None
    """FairShare of its account; None: not said."""
    qos: str = ""
    tier: int = 1
    """PriorityTier of its partition."""
    nice: int = 0
    """Points that its user takes off its priority (sbatch --nice)."""
    gpu_type: str = ""
    """Type of GPU that it asks for; empty: any."""
    barred: frozenset[str] = frozenset()
    """Nodes on which it may not run, for they do not meet its constraint."""
    array: str = ""
    """The job array that it belongs to; empty: none."""
    array_limit: int | None = None
    """Jobs of the array that run at once (sbatch --array=0-9%2); None: all."""
    licenses: tuple[tuple[str, int], ...] = ()
    """Licenses that it takes while it runs, and how many of each."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """The trace's other columns, as they are."""

    @property
    def iteration_s(self) -> float:
        """Return the time of an iteration at the proportional share; 1 s when nothing says more."""
        if self.iterations:
            return self.work_s / self.iterations
        return self.profile.iteration_s if self.profile is not None else 1.0

    def fewest_nodes(self, like: Node) -> int:
        """Return the number of nodes of this kind that the job needs."""
        if self.gpus:
            return -(-self.gpus // like.gpus)
        return max(-(-self.cpus_on(like) // like.cpus), -(-self.memory_mb // like.memory_mb), 1)

    @property
    def memory_mb(self) -> int:
        """Return the memory that its user asks for on all its nodes, 0 where that follows from its GPUs."""
        return int((self.memory_gb_per_gpu or 0.0) * MB_PER_GB * max(self.gpus, 1))

    def cpus_on(self, like: Node) -> int:
        """Return the job's CPUs on the fewest nodes of this kind, which may have less than its user asked for."""
        if not self.gpus:
            return self.cpus or 0
        if self.cpus is None:
            return int(like.cpus / like.gpus * self.gpus)
        return min(self.cpus, like.cpus * self.gpus // -(-self.gpus // self.fewest_nodes(like)))


def read_trace(
    text: str,
    source: str,
    profiles: Mapping[str, Profile],
    assign: ModelMix | None = None,
    queue: QueueRules = PLAIN_QUEUE,
) -> tuple[TraceJob, ...]:
    """Return a trace's jobs in order of submission, then id.

    Columns: ``job`` (a whole number, once), ``submit_s`` (seconds since the start), ``gpus``, and ``iterations`` or
    ``duration_s`` (seconds at the proportional share). With ``iterations`` alone the work is their number times the
    profile's ``iteration_s``; with both, an iteration takes this job ``duration_s / iterations``. Optional:
    those of ``MORE``; an empty cell is as none. ``qos`` and ``license`` are names that ``queue`` has. A ``tier`` other
    than 1 is a partition of its own on the same nodes. ``priority`` is refused: an option of a job that no site of a
    simulation allows. All other columns are kept as ``tags``. A job without a model gets one from ``assign``, in order
    of submission, else it has no profile and always runs at its proportional speed. Raise InputError with file, line
    and column.
    """
    table = read_table(text, source, REQUIRED, None)
    if not any(name in table.columns for name in LENGTHS):
        raise InputError(f"{source}:1: column 'iterations' or 'duration_s' is missing: nothing says how long jobs run")
    ours = (*REQUIRED, *OPTIONAL)
    for name in table.columns:
        if name.lower() == "priority":
            raise InputError(f"{source}:1: column {quoted(name)} has no effect; give nice, qos or tier")
        if name not in ours and name.lower() in ours:
            raise InputError(f"{source}:1: unknown column {quoted(name)}; {suggest(name.lower(), ours)}")
    rows = _Rows(table, profiles, assign, queue)
    return tuple([rows.job(*row) for row in rows.in_order()])


class _Rows:
    """Turns rows into jobs; positions of columns are looked up once."""

    def __init__(
        self, table: Table, profiles: Mapping[str, Profile], assign: ModelMix | None, queue: QueueRules
    ) -> None:
        self._table = table
        self._queue = queue
        self._shares: dict[str, tuple[float, int]] = {}
        """Share of each account, and the line that says it."""
        self._profiles = profiles
        self._models = assign.models() if assign is not None else repeat("")
        self._at = {name: position for position, name in enumerate(table.columns) if name in (*REQUIRED, *OPTIONAL)}
        self._tags = [(name, position) for position, name in enumerate(table.columns) if name not in self._at]
        self._extra = [name for name in MORE if name in self._at]

    def in_order(self) -> list[tuple[float, int, int, list[str]]]:
        """Return (submit_s, id, line, cells) of each row in order of submission; raise InputError for an id twice."""
        at_job, at_submit = self._at["job"], self._at["submit_s"]
        lines: dict[int, int] = {}
        found = []
        for line, cells in self._table.rows:
            job = self._integer(line, cells[at_job], "job", 0, 2**ID_BITS - 1)
            if lines.setdefault(job, line) != line:
                raise InputError(f"{self._table.source}:{line}: job {job} is there twice, first in line {lines[job]}")
            found.append((self._number(line, cells[at_submit], "submit_s"), job, line, cells))
        return sorted(found)

    def job(self, submit_s: float, job: int, line: int, cells: Sequence[str]) -> TraceJob:
        """Return one row's job."""
        gpus = self._integer(line, cells[self._at["gpus"]], "gpus", 1, MAX_JOB_GPUS)
        model, profile = self._model(line, cells)
        iterations, work_s = self._length(line, cells, profile)
        return TraceJob(
            id=job,
            submit_s=submit_s,
            gpus=gpus,
            work_s=work_s,
            model=model,
            profile=profile,
            iterations=iterations,
            tags={name: cells[position] for name, position in self._tags},
            **(self._more(line, cells, gpus) if self._extra else {}),
        )

    def _integer(self, line: int, text: str, column: str, least: int, most: int) -> int:
        """Return a whole number; the checked reader handles unusual ones."""
        if text.isascii() and text.isdigit() and len(text) <= USUAL_DIGITS and least <= (value := int(text)) <= most:
            return value
        return integer(text, self._table.at(line, column), least, most)

    def _number(self, line: int, text: str, column: str) -> float:
        """Return a number of seconds; the checked reader handles unusual ones."""
        if text.isascii() and text.isdigit() and len(text) <= USUAL_SECONDS:
            return float(text)
        return number(text, self._table.at(line, column), 0.0, LATEST_S)

    def _cell(self, cells: Sequence[str], column: str) -> str:
        position = self._at.get(column)
        return "" if position is None else cells[position]

    def _model(self, line: int, cells: Sequence[str]) -> tuple[str, Profile | None]:
        """Return a row's model and its profile; without profiles a model is only a name."""
        model = self._cell(cells, "model") or next(self._models)
        if not model or not self._profiles:
            return model, None
        if model not in self._profiles:
            where = self._table.at(line, "model")
            lacks = f"there is no profile of {quoted(model)} (--profiles FILE gives it)"
            raise InputError(f"{where}: {lacks}; {suggest(model, self._profiles)}")
        return model, self._profiles[model]

    def _length(self, line: int, cells: Sequence[str], profile: Profile | None) -> tuple[int | None, float]:
        """Return a row's iterations, if known, and its work in seconds at the proportional share."""
        count, duration = self._cell(cells, "iterations"), self._cell(cells, "duration_s")
        iterations = self._integer(line, count, "iterations", 1, 10**15) if count else None
        if duration:
            work_s = self._number(line, duration, "duration_s")
            return iterations, work_s or positive(duration, self._table.at(line, "duration_s"))
        if iterations is None:
            raise InputError(f"{self._table.source}:{line}: iterations and duration_s are empty; one must be there")
        where = self._table.at(line, "iterations")
        if profile is None:
            raise InputError(f"{where}: without a profiled model nothing says how long one takes; give duration_s")
        work_s = iterations * profile.iteration_s
        if work_s > LATEST_S:
            raise InputError(f"{where}: {iterations} take {work_s:g} s, more than {LATEST_S:g}")
        return iterations, work_s

    def _more(self, line: int, cells: Sequence[str], gpus: int) -> dict[str, Any]:
        """Return the values of a row's optional columns that are not empty."""
        more: dict[str, Any] = {}
        whole = {**WHOLE, "min_gpus": (1, gpus), "max_gpus": (gpus, MAX_JOB_GPUS)}
        for name in self._extra:
            text = self._cell(cells, name)
            if not text:
                continue
            where = self._table.at(line, name)
            if name in whole:
                more[name] = integer(text, where, *whole[name])
            elif name in NUMBERS:
                more[name] = positive(text, where, NUMBERS[name])
            elif name in ("checkpoints", "managed"):
                if text not in YES_NO:
                    raise InputError(f"{where}: {quoted(text)} is neither yes nor no")
                more[name] = YES_NO[text]
            elif name == "license":
                more["licenses"] = self._licenses(text, where)
            else:
                more[name] = text
        self._check_site(line, more)
        return more

    def _licenses(self, text: str, where: str) -> tuple[tuple[str, int], ...]:
        """Return licenses and their numbers: ``matlab``, or ``matlab:2;ansys``."""
        found: dict[str, int] = {}
        for part in text.split(";"):
            name, colon, count = part.strip().partition(":")
            if name not in self._queue.licenses:
                raise InputError(f"{where}: {quoted(name)} is no license of the site; {SITE}")
            found[name] = integer(count, where, 1, self._queue.licenses[name]) if colon else 1
        return tuple(found.items())

    def _check_site(self, line: int, more: dict[str, Any]) -> None:
        """Raise InputError for what would have no effect; put a job of another tier into that tier's partition."""
        if (qos := more.get("qos")) is not None and qos not in self._queue.qos:
            raise InputError(f"{self._table.at(line, 'qos')}: {quoted(qos)} is no QOS of the site; {SITE}")
        if "array_limit" in more and "array" not in more:
            raise InputError(f"{self._table.at(line, 'array_limit')}: goes with an array, and the row names none")
        if "share" in more:
            where = self._table.at(line, "share")
            if "account" not in more:
                raise InputError(f"{where}: is that of an account, and the row names none")
            share, first = self._shares.setdefault(more["account"], (more["share"], line))
            if share != more["share"]:
                raise InputError(f"{where}: {quoted(more['account'])} has {share:g} in line {first}")
        if more.get("tier", 1) != 1:
            more["partition"] = f"{PARTITION}-tier{more['tier']}"
