"""Runs of a what-if: the past as it was, Slurm alone, and Cadenza as it ships for each part of movable jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.policies.core.errors import CadenzaError, InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.cluster import MAX_LANES, read_cluster
from cadenza.policies.inputs.csv_table import integer, number, quoted
from cadenza.policies.simulator.figures import Summary, summarize
from cadenza.policies.simulator.result_file import Saved, encode, save_run
from cadenza.policies.simulator.shareable import Unshareable
from cadenza.slurm_plugin.gateway.slurm_gateway import answer_of, json_of
from cadenza.slurm_plugin.history.answer_file import read_answer
from cadenza.slurm_plugin.history.as_it_was import NO_FEATURES, History, as_it_was, read_history
from cadenza.slurm_plugin.history.cluster_nodes import Hosts, read_hosts, with_lanes
from cadenza.slurm_plugin.history.job_records import JobRecords, read_job_records
from cadenza.slurm_plugin.history.site_answers import SiteFacts, read_site
from cadenza.slurm_plugin.report.loader import load
from cadenza.slurm_plugin.report.page_model import Loaded, Run
from cadenza.slurm_plugin.report.units import NARROW, about
from cadenza.slurm_plugin.simulations.array import collect
from cadenza.slurm_plugin.simulations.request import Site
from cadenza.slurm_plugin.simulations.run_pool import Task, estimate_s, run_tasks
from cadenza.slurm_plugin.simulations.runner import note

AS_IT_WAS, SLURM = "as it was", "slurm"
TIMEOUT_S = 600.0
HISTORY_OPTIONS = ("sacct", "since", "nodes", "partition", "sample", "movable", "users", "draws")
ASKED = (
    (answer_of, ("scontrol", "show", "config")), (json_of, ("scontrol", "--all", "show", "partition")),
    (json_of, ("sacctmgr", "show", "assoc")), (json_of, ("sacctmgr", "show", "qos")),
)  # fmt: skip
"""Commands that tell a cluster's rules."""
MAX_PARTS, MAX_DRAWS = 8, 20
LANE, MEMORY = MORE = ("lane", "memory")
MIN_SAMPLE = 0.001
LARGE_JOBS = 5_000
"""Number of jobs above which a run says how long it will take, and fewer parts and draws are simulated unasked."""
MOVABLE, USERS, DRAWS = (0.1, 0.25, 0.5, 1.0), (0.1, 0.5), 3
LARGE_MOVABLE = (0.1, 0.5)
PATIENCE_S = 120.0
"""Time from which on the shorter ways are named."""
MAIN = 0.5
"""The part that is spoken of first, and drawn several times; without it the last part of the jobs."""
SHOWN = (
    "jobs", "unfinished", "avg_jct_h", "p50_jct_h", "p99_jct_h", "mean_bounded_slowdown", "wait_1_gpu_h",
    "wait_2_to_7_gpus_h", "wait_8_gpus_h", "wait_more_gpus_h", "gpu_utilization", "cpu_utilization",
    "idle_waiting_gpus", "restarts",
)  # fmt: skip
"""Figures of a run that say something to who decides."""
NOT_IN_ACCOUNTING = ("idle_waiting_gpus", "cpu_utilization", "restarts")
"""Those that the accounting of a cluster does not have."""


class Point(NamedTuple):
    """Cadenza with one part of the jobs that keep checkpoints, or of the users all of whose jobs do: a run a draw."""

    users: bool
    part: float
    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class WhatIf:
    """The history, and its results: as it was, Slurm alone, and Cadenza for each part of movable jobs."""

    history: History
    nodes: tuple[Node, ...]
    results: tuple[Loaded, ...]
    """As many runs each as there are draws; those that nothing is drawn for are all the same."""
    points: tuple[Point, ...]
    """Parts of jobs and then of users, each in the order asked for."""
    unshareable: Unshareable | None
    last: str
    """Label of the run with the last part of movable jobs."""
    more: int
    """Number of runs after that one, each on a cluster with more of something."""
    easy: Summary
    """The same jobs in the order of submission, with one reservation."""
    remarks: tuple[str, ...] = ()
    """Sentences ahead of those on the runs."""
    site_notes: tuple[str, ...] = ()
    """Sentences on rules of the site that are not known, or not simulated."""

    @property
    def past(self) -> Run:
        """Return the past as it was."""
        return self.results[0].runs[0]


@dataclass(frozen=True)
class Plan:
    """The runs of a what-if."""

    movable: tuple[float, ...] | None = None
    """Parts of the jobs that keep checkpoints; None: by the number of jobs, as for the next two."""
    users: tuple[float, ...] | None = None
    """Parts of the users who opt in, with checkpoints of all their jobs; the others' jobs are Slurm's alone."""
    draws: int | None = None
    """Draws of the main part, a run each."""
    site: SiteFacts = field(default_factory=SiteFacts)
    lanes: int = 1
    more: tuple[str, ...] = ()
    partition: str | None = None
    quiet: bool = True
    array: Path | None = None
    """Folder of an array of Slurm that runs the simulations; None: they run here."""
    command: str = "whatif"
    arguments: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def parts(self, jobs: int) -> tuple[tuple[float, ...], tuple[float, ...], int]:
        """Return the parts of the jobs and of the users, and the draws, for this number of jobs."""
        large = jobs > LARGE_JOBS
        movable = self.movable or (LARGE_MOVABLE if large else MOVABLE)
        users = (() if large or self.movable else USERS) if self.users is None else self.users
        return movable, users, self.draws or (1 if large else DRAWS)


class Variant(NamedTuple):
    """One simulation: its label, the part of the jobs or users, the nodes, its options, and the number of its draw."""

    label: str
    part: float
    nodes: tuple[Node, ...]
    options: Mapping[str, str]
    users: bool = False
    draw: int = 1

    def task(self, jobs: History, plan: Plan) -> Task:
        """Return the simulation of these jobs."""
        options = {"quiet": plan.quiet, **self.options, "label": self.label}
        trace = jobs.trace(self.part, self.draw, by_user=self.users)
        site = Site(trace, self.nodes, jobs.load_trace(), plan.site.queue, plan.site.backfill)
        return Task(options, plan.arguments, site)


def main_part(movable: Sequence[float]) -> float:
    """Return the part of the jobs that is drawn several times."""
    return MAIN if MAIN in movable else movable[-1]


def label_of(part: float, *, users: bool = False) -> str:
    """Return the name of the runs with a part of the jobs, or of the users."""
    return f"{100 * part:.3g} % {'of the users' if users else 'can move'}"


def run_whatif(words: Mapping[str, Any]) -> WhatIf:
    """Read the accounting and the nodes, and run the simulations; raise InputError, or an error of the gateway."""
    lanes = integer(words["lanes"], "--lanes", 1, MAX_LANES)
    sample = number(words["sample"], "--sample", MIN_SAMPLE, 1) if words["sample"] is not None else None
    more = _one_more(words["more"], lanes)
    draws = None if words["draws"] is None else integer(words["draws"], "--draws", 1, MAX_DRAWS)
    if words["array"] is not None and words["since"]:
        raise InputError("--array: goes with --sacct and --nodes, for the same command has to find the same jobs again")
    accounting, source = _accounting(words)
    records = read_job_records(accounting, source)
    hosts, site = _nodes(words, frozenset().union(*{run.nodes for run in records.runs if run.gpus})), _site(words)
    plan = Plan(
        _parts(words["movable"], "--movable"), _parts(words["users"], "--users"), draws,
        replace(site, notes=(*hosts.notes, *site.notes)), lanes, more, words["partition"], quiet=words["quiet"],
        array=words["array"],
        arguments=(
            *(f"--{name.replace('_', '-')}={words[name]}" for name in HISTORY_OPTIONS if words[name]),
            *(f"--site={file}" for file in words["site"]),
        ),
    )  # fmt: skip
    return run_plan(plan, records, with_lanes(hosts.nodes, lanes), source, sample, hosts.features)


def run_plan(
    plan: Plan, records: JobRecords, nodes: tuple[Node, ...], source: str, sample: float | None = None,
    features: Mapping[str, frozenset[str]] = NO_FEATURES,
) -> WhatIf:  # fmt: skip
    """Run the simulations; raise InputError where no job is left, or jobs and nodes do not go together.

    ``source``: name of the records in messages; ``sample``: part of the jobs; ``features``: of the nodes.
    """
    site = plan.site
    # 1. The past as it was.
    if not nodes:
        raise InputError(f"no host is left to simulate: {' '.join(site.notes)}")
    history = read_history(records, nodes, plan.partition, site.queue, features)
    if sample is not None:
        history = history.sample(sample)
    if not history.jobs:
        counts = "; ".join(f"{count} {reason}" for reason, count in history.left_out.most_common())
        first = f"; the first: {records.example}" if records.example else ""
        without = records.runs and not any(run.gpus for run in records.runs)
        hint = "; the accounting has no gres/gpu: is it in Slurm's AccountingStorageTRES?" if without else ""
        raise InputError(f"{source}: no job is left to simulate" + (f": {counts}{first}{hint}" if counts else ""))
    past = as_it_was(history, nodes)
    known = {key: value for key, value in asdict(summarize(past)).items() if key not in NOT_IN_ACCOUNTING}
    it_was = load(
        encode(Saved(AS_IT_WAS, plan.arguments, past.gpus, past.cpus, (save_run(past, None, known),))), source
    )
    # 2. Slurm alone, and Cadenza with each part of movable jobs, and of users who opt in.
    variants = variants_of(plan, history, nodes)
    if len(history.jobs) > LARGE_JOBS and plan.array is None:
        low_s, high_s, timed = estimate_s(
            lambda count: [
                one.task(history.consecutive((len(history.jobs) - count) // 2, count), plan) for one in variants
            ],
            len(history.jobs),
        )
        line = f"{len(history.jobs):,} jobs: {about(low_s)} to {about(high_s)}, estimated from {timed:,} of them"
        line += "; --sample 0.2 or --array FOLDER takes less" if high_s > PATIENCE_S else ""
        note(line.replace(NARROW, " "))
    tasks = [one.task(history, plan) for one in variants]
    outcomes = run_tasks(tasks, quiet=plan.quiet) if plan.array is None else collect(plan.array, tasks)
    # 3. The draws of one part are the runs of one result.
    found: dict[str, list[Loaded]] = {AS_IT_WAS: [it_was]}
    for variant, outcome in zip(variants, outcomes, strict=True):
        found.setdefault(variant.label, []).append(load(outcome.saved, source))
    movable, users, draws = plan.parts(len(history.jobs))
    drawn = {label: _drawn([file.runs[0] for file in files], draws) for label, files in found.items()}
    parts = [(False, part) for part in movable] + [(True, part) for part in users]
    labels = [label_of(part, users=by_user) for by_user, part in parts]
    points = tuple(
        Point(*one, label, drawn[label][: len(found[label])]) for one, label in zip(parts, labels, strict=True)
    )
    apart = {point.label for point in points if point.users}
    results = tuple(
        replace(files[0], label=label, command=plan.command, runs=drawn[label])
        for label, files in found.items()
        if label not in apart
    )
    easy = next(outcome.easy for outcome in outcomes if outcome.easy is not None)
    unshareable = next((outcome.unshareable for outcome in outcomes if outcome.unshareable is not None), None)
    return WhatIf(
        history, nodes, results, points, unshareable, label_of(movable[-1]), len(plan.more), easy,
        plan.remarks, (*site.notes, *history.notes, *_unknown(records)),
    )  # fmt: skip


def variants_of(plan: Plan, history: History, nodes: tuple[Node, ...]) -> list[Variant]:
    """Return the simulations. Where all jobs can move there is nothing to draw."""
    movable, users, draws = plan.parts(len(history.jobs))
    lanes = {"lanes": str(plan.lanes)}
    parts = [(False, part) for part in movable] + [(True, part) for part in users]
    return [
        Variant(SLURM, 0.0, nodes, {"share": "none"}),
        *(
            Variant(label_of(part, users=by_user), part, nodes, lanes, by_user, draw)
            for by_user, part in parts
            for draw in range(1, 1 + (draws if part == main_part(movable) < 1 and not by_user else 1))
        ),
        *(_more(name, plan, movable[-1], nodes) for name in plan.more),
    ]


def _drawn(runs: Sequence[Run], draws: int) -> tuple[Run, ...]:
    """Return the runs of one result as those of the draws, with the figures that count; one without draws is in all."""
    found = []
    for draw, run in enumerate(runs if len(runs) == draws else [runs[0]] * draws, 1):
        figures = dict(run.summary)
        if "restarts" in figures:  # a job that moves is requeued, and starts again from its checkpoint
            figures["restarts"] += figures.get("migrations", 0.0)
        shown = {key: figures[key] for key in SHOWN if key in figures}
        found.append(replace(run, summary=shown, seed=draw if draws > 1 else None))
    return tuple(found)


def _unknown(records: JobRecords) -> Iterator[str]:
    """Yield sentences on what the accounting does not tell of any job."""
    runs = [run for run in records.runs if run.gpus]
    for name, told in (("account", any(run.account for run in runs)), ("QOS", any(run.qos for run in runs))):
        if not told:
            yield f"The accounting does not name the jobs' {name}: all have the same."


def _parts(text: str | None, option: str) -> tuple[float, ...] | None:
    """Return the fractions that an option names, each once; None without it."""
    if text is None:
        return None
    parts = tuple(dict.fromkeys(number(part.strip(), option, 0, 1) for part in text.split(",")))
    if len(parts) > MAX_PARTS:
        raise InputError(f"{option}: {len(parts)} parts are more than {MAX_PARTS}")
    return parts


def _one_more(text: str | None, lanes: int) -> tuple[str, ...]:
    """Return the names in --more, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()
    for name in names:
        if name not in MORE:
            raise InputError(f"--more: {quoted(name)} is not {' or '.join(MORE)}")
    if LANE in names and lanes == MAX_LANES:
        raise InputError(f"--more: {lanes} lanes are the most there can be")
    return names


def _more(name: str, plan: Plan, part: float, nodes: tuple[Node, ...]) -> Variant:
    """Return the run on a cluster with one more lane, or with twice the memory."""
    label, lanes = label_of(part), plan.lanes
    if name == LANE:
        lanes += 1
        return Variant(f"{label}, {lanes} lanes", part, with_lanes(nodes, lanes), {"lanes": str(lanes)})
    larger = tuple(replace(node, memory_mb=2 * node.memory_mb) for node in nodes)
    return Variant(f"{label}, twice the memory", part, larger, {"lanes": str(lanes)})


def _accounting(words: Mapping[str, Any]) -> tuple[str, str]:
    """Return the accounting and its name in messages."""
    sacct, since = words["sacct"], words["since"]
    if bool(sacct) == bool(since):
        raise InputError("whatif: give either --sacct FILE, or --since WHEN on a cluster")
    if sacct:
        return read_answer(sacct, "--sacct"), str(sacct)
    begin = datetime.fromtimestamp(words["since_s"], UTC).astimezone()
    start = begin.strftime("%FT%T")
    return json_of(("sacct", "--allusers", "--duplicates", "--starttime", start), TIMEOUT_S), "sacct"


def _site(words: Mapping[str, Any]) -> SiteFacts:
    """Return the rules of the site: from files, or on its cluster from Slurm itself."""
    if words["site"] or not words["since"]:
        return read_site((read_answer(file, "--site"), file) for file in words["site"])
    return ask_site()


def ask_site() -> SiteFacts:
    """Return the rules of this cluster's Slurm, as far as it answers."""
    answers, notes = [], []
    for ask, command in ASKED:
        try:
            answer = ask(command, TIMEOUT_S), " ".join(command)
            read_site([answer])
            answers.append(answer)
        except CadenzaError as error:
            notes.append(f"{printable(str(error), 200)}.")
    site = read_site(answers)
    return replace(site, notes=(*notes, *site.notes))


def _nodes(words: Mapping[str, Any], used: frozenset[str]) -> Hosts:
    """Return the hosts, of which jobs of the past ``used`` some; a text is their shape, or the name of a file."""
    text = words["nodes"]
    if text is None and words["since"]:
        return read_hosts(
            json_of(("scontrol", "--all", "show", "node"), TIMEOUT_S), "scontrol", words["partition"], used
        )
    if text is None:
        raise InputError(
            "--nodes: is missing; a file of scontrol --all show node --json, or a shape such as 4x8:24:500"
        )
    if Path(text).is_file():
        return read_hosts(read_answer(text, "--nodes"), text, words["partition"], used)
    try:
        return Hosts(read_cluster(text))
    except InputError as error:
        raise InputError(f"--nodes: {quoted(text)} is no file, and {error}") from None
