"""The pages' contents, from the readers behind ``top``, ``why`` and ``report``, cut to what a viewer may see."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.idle_gpus import HOLDING
from cadenza.policies.core.model import Gpu, Job
from cadenza.policies.core.text import gpu_names
from cadenza.sidecar.clock import Clock, local
from cadenza.slurm_plugin.errors import NO_ROUND
from cadenza.slurm_plugin.report.draw import LIGHT
from cadenza.slurm_plugin.report.units import about, milliseconds
from cadenza.slurm_plugin.service.job_access import Viewer
from cadenza.slurm_plugin.service.own_jobs import Veil, own_snapshot
from cadenza.slurm_plugin.service.store.reader import LeaseRow, Round, StoreReader, host_faults
from cadenza.slurm_plugin.views.cluster_view import STALE_AFTER_S, JobRow, TopView, percentile, view_of
from cadenza.slurm_plugin.views.job_sentences import effect_sentence, sections, state_lines, summary
from cadenza.slurm_plugin.views.sharing_sheet import gather, sheet
from cadenza.slurm_plugin.web.gpu_grid import HostSquares, PartitionRow, partition_rows, squares
from cadenza.slurm_plugin.web.timelines import Stretch, axis, columns, timeline
from cadenza.slurm_plugin.web.viewers import PageRefusedError

HOUR_S = 3600.0
HOSTS_A_PAGE = 64
MAX_JOBS, MAX_ROWS, MAX_SLOWEST = 500, 100, 10
PARTS_OF_HOUR = 30
REFRESH_S, KEEP_S = 5, 2.0
KEEP_REPORT_S = 60.0
"""A report may simulate Slurm's queue for a second, and its hours change slowly."""
PERIODS = {"1d": 1, "7d": 7, "30d": 30, "90d": 90}
MAX_PAGE = 64 * 2**20
WHATIF = re.compile(r"[\w.-]{1,100}\.html", re.ASCII)
ANOTHER = "another user's job"


class Page(NamedTuple):
    """A page's template and values; seconds until it is fetched again (0: never), and those for which it is kept."""

    template: str
    values: Mapping[str, Any]
    refresh_s: int = 0
    keep_s: float = KEEP_S


class Question(NamedTuple):
    """The viewer, the last part of the path, and the values of the query."""

    viewer: Viewer
    name: str
    query: Mapping[str, str]


class Seen(NamedTuple):
    """The last round, what ``top`` shows of it, and all that is the same for every viewer."""

    last: Round
    view: TopView
    hosts: tuple[HostSquares, ...]
    partitions: tuple[PartitionRow, ...]
    places: Mapping[tuple[str, str], Sequence[int]]
    """Places in the view's jobs of those of each user and account."""
    jobs: Mapping[int, Job]

    def cut(self, viewer: Viewer) -> TopView:
        """Return the view without the jobs of others, as ``top`` shows it to this viewer; counts stay."""
        if viewer.everything:
            return self.view
        own = sorted(at for owner, places in self.places.items() if viewer.may_read(*owner) for at in places)
        veil = self.veil(viewer)
        return replace(
            self.view,
            gpus=(),
            jobs=tuple(veil.row(self.view.jobs[at]) for at in own),
            effects=tuple(veil.row(effect) for effect in self.view.effects if viewer.may_read(effect.user)),
            faults=tuple(one for one in self.view.faults if veil.text(one) == one),
            closed=tuple(one for one in self.view.closed if veil.text(one) == one),
            waiting_that_fit=(),
        )

    def veil(self, viewer: Viewer) -> Veil:
        """Return the veil over the hosts that Slurm hides from this viewer."""
        if viewer.everything or viewer.hosts:
            return Veil()
        return Veil.over(self.last.snapshot, own_snapshot(self.last.snapshot, viewer))


@dataclass
class Site:
    """The store that is shown, and the last round, which is decoded once for all viewers."""

    store: Path
    whatifs: Path | None
    clock: Clock
    _seen: tuple[tuple[int, int], Seen] | None = None
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def seen(self, reader: StoreReader) -> Seen:
        """Return the last round; raise PageRefusedError before the first."""
        now_s = self.clock.now()
        key = reader.last_number(), int(now_s // STALE_AFTER_S)  # the view says for how long no round has followed
        with self._busy:
            kept = self._seen
            if kept is None or kept[0] != key:
                if (last := reader.round()) is None:
                    raise PageRefusedError(503, NO_ROUND)
                self._seen = kept = key, _seen(last, view_of(reader, last, now_s))
        return kept[1]


def _seen(last: Round, view: TopView) -> Seen:
    hosts = squares(last.snapshot, last.memory, view.gpus)
    places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for at, one in enumerate(view.jobs):
        places[one.user, one.account].append(at)
    jobs = {one.key.id: one for one in last.snapshot.jobs}
    return Seen(last, view, hosts, partition_rows(last.snapshot, hosts), places, jobs)


PageMaker: TypeAlias = Callable[[Site, StoreReader, Question], Page]


def now(site: Site, reader: StoreReader, asked: Question) -> Page:
    """Return the page of the last round: faults, figures, the GPUs of each host, partitions and jobs."""
    seen = site.seen(reader)
    view, hidden = seen.cut(asked.viewer), seen.veil(asked.viewer).hidden
    hosts = [one for one in seen.hosts if one.name not in hidden]
    pages = max(1, -(-len(hosts) // HOSTS_A_PAGE))
    times = (("p50", view.yield_p50_s), ("p99", view.yield_p99_s))
    page = min(max(_number(asked.query.get("page", "1")), 1), pages)
    values = {
        "view": view, "at": local_second(seen.last.at_s), "alive": sum(agent.alive for agent in view.agents),
        "partitions": seen.partitions, "own": {one.id for one in view.jobs},
        "page": page, "pages": pages, "all_hosts": len(hosts),
        "hosts": hosts[(page - 1) * HOSTS_A_PAGE : page * HOSTS_A_PAGE], "waiting": len(seen.view.waiting_that_fit),
        "yields": [(part, milliseconds(time_s)) for part, time_s in times if time_s is not None],
        "jobs": job_cells(view.jobs[:MAX_JOBS]), "more_jobs": len(view.jobs) - MAX_JOBS,
        "effects": [(one.job, local_second(one.at_s), effect_sentence(one)) for one in view.effects],
    }  # fmt: skip
    return Page("now.html", values, REFRESH_S)


def job(site: Site, reader: StoreReader, asked: Question) -> Page:
    """Return a job's story; another user's job and one that was never seen look alike."""
    number = _number(asked.name)
    seen = site.seen(reader)
    last = seen.last
    owner = reader.owner(number, last)
    record = seen.veil(asked.viewer).record(reader.job_record(number, MAX_ROWS, last))
    if not asked.viewer.everything and (owner is None or not asked.viewer.may_read(*owner)):
        raise PageRefusedError(404, f"job {number}: nothing on record of a job of yours")
    if not record.exists:
        raise PageRefusedError(404, f"job {number}: nothing on record; Cadenza never saw it or has deleted its record")
    # 1. When it had its GPUs, also those that it has now.
    rows = [*reader.leases(job=number, limit=1000), *(row for row in _current(last) if row.job == number)]
    stretches = [Stretch(_place(row), row.from_s, row.to_s, 1, _stretch_text(row, _place(row))) for row in rows]
    drawing, period = None, ""
    if stretches:
        begin_s = min(*(one.from_s for one in stretches), record.job.submit_s if record.job else last.at_s)
        end_s = max(*(one.to_s for one in stretches), last.at_s if record.job else 0.0) + 1.0
        drawing = timeline(stretches, sorted({one.key for one in stretches}), begin_s, end_s)
        period = f"{local(begin_s)} to {local(end_s)}"
    # 2. What sharing cost it and brought it.
    hours = reader.job_hours(number)
    figures = [
        ("GPU hours", f"{sum(row.gpu_s for row in hours) / HOUR_S:.2f}"),
        ("of them on further lanes", f"{sum(row.further_gpu_s for row in hours) / HOUR_S:.2f}"),
        ("Time in the queue", about(sum(row.queue_s for row in hours))),
        ("Waiting for turns", about(sum(row.turn_s for row in hours))),
        ("Yields", str(sum(row.yields for row in hours))),
    ]
    values = {
        "record": record, "summary": summary(record), "state": list(state_lines(record.job)) if record.job else [],
        "drawing": drawing, "period": period, "figures": figures if hours else [], "sections": sections(record),
    }  # fmt: skip
    return Page("job.html", values, REFRESH_S)


def host(site: Site, reader: StoreReader, asked: Question) -> Page:
    """Return a host's last hour: who had each of its GPUs, its lanes and its faults."""
    seen = site.seen(reader)
    last = seen.last
    nodes = [node for node in last.snapshot.nodes if node.host == asked.name]
    if not nodes or asked.name in seen.veil(asked.viewer).hidden:
        raise PageRefusedError(404, "Slurm has no host of this name")
    since_s = last.at_s - HOUR_S
    rows = [*reader.leases(since_s, host=asked.name), *(row for row in _current(last) if row.host == asked.name)]
    past: dict[int, tuple[str, str]] = {}
    stretches: list[Stretch] = []
    colors: dict[int, int] = {}  # 0 stands for all jobs that the viewer may not see
    for row in sorted(rows, key=lambda row: -row.to_s):
        one = seen.jobs.get(row.job)
        if one is None and row.job not in past:
            past[row.job] = reader.past_owner(row.job) or ("", "")
        owner = (one.user, one.account) if one else past[row.job]
        number = row.job if asked.viewer.may_read(*owner) else 0
        color = colors.setdefault(number, 1 + len(colors) % (len(LIGHT) - 1) if number else 0)
        text = _stretch_text(row, f"job {row.job} {one.name if one else ''}".rstrip() if number else ANOTHER)
        stretches += (Stretch(f"GPU {gpu}", row.from_s, row.to_s, color, text) for gpu in row.gpus)
    gpus = [f"GPU {at}" for at in range(max(node.gpus for node in nodes))]
    here = [one for one in seen.cut(asked.viewer).jobs if {gpu.host for gpu in one.gpus} & {asked.name}]
    values = {
        "host": asked.name, "drawing": timeline(stretches, gpus, since_s, last.at_s), "jobs": job_cells(here),
        "colors": [(color, number) for number, color in colors.items()][:MAX_ROWS],
        "lanes": sorted((node.lane, node.name, node.closed_reason or "takes jobs") for node in nodes),
        "faults": host_faults(last.snapshot, [node.name for node in nodes]),
    }  # fmt: skip
    return Page("host.html", values, REFRESH_S)


def turns(site: Site, reader: StoreReader, asked: Question) -> Page:
    """Return the last hour's yields and resumes, of one partition or of all."""
    last = site.seen(reader).last
    since_s = last.at_s - HOUR_S
    names = sorted({name for node in last.snapshot.nodes if node.gpus for name in node.partitions})
    chosen = asked.query.get("partition", "")
    if chosen and chosen not in names:
        raise PageRefusedError(404, "Slurm has no partition with GPUs of this name")
    hosts = {node.host for node in last.snapshot.nodes if not chosen or chosen in node.partitions}
    rows = [row for row in reader.switches(since_s, limit=100_000) if row.host in hosts]
    kinds = []
    for kind in sorted({row.kind for row in rows}, reverse=True):
        mine = [row for row in rows if row.kind == kind]
        times = sorted(row.total_s for row in mine)
        percentiles = (milliseconds(percentile(times, part) or 0.0) for part in (0.5, 0.99, 1.0))
        kinds.append((kind, len(mine), *percentiles, f"{sum(row.bytes for row in mine) / 1e9:.1f} GB"))
    bars = columns((row.at_s for row in rows if row.kind == "yield"), since_s, last.at_s, PARTS_OF_HOUR)
    slowest = sorted(rows, key=lambda row: -row.total_s)[:MAX_SLOWEST] if asked.viewer.everything else []
    values = {
        "partitions": names, "chosen": chosen, "kinds": kinds, "yields": sum(row.kind == "yield" for row in rows),
        "drawing": bars, "most": max((bar.number for bar in bars), default=0),
        "slowest": [
            (row.job, row.host, row.kind, milliseconds(row.total_s), local_second(row.at_s)) for row in slowest
        ],
        "ticks": axis(since_s, last.at_s),
    }  # fmt: skip
    return Page("turns.html", values, REFRESH_S)


def report(site: Site, reader: StoreReader, asked: Question) -> Page:
    """Return the effect of sharing: for the whole site, or for the jobs of a viewer."""
    period = asked.query.get("since", "7d")
    if period not in PERIODS:
        raise PageRefusedError(404, f"no such time; there are {', '.join(PERIODS)}")
    if not asked.viewer.user and not asked.viewer.everything:
        raise PageRefusedError(403, "the report is about jobs of users, and this page does not know who you are")
    user = None if asked.viewer.everything else asked.viewer.user
    now_s = site.clock.now()
    try:
        found = gather(reader, now_s - PERIODS[period] * 24 * HOUR_S, now_s, user)
    except InputError:  # its words name other users
        raise PageRefusedError(404, f"nothing on record in the last {period}") from None
    content = sheet(found, "What sharing changed" + (f" for {user}" if user else ""))
    return Page("report.html", {"sheet": content, "period": period, "periods": PERIODS}, keep_s=KEEP_REPORT_S)


def whatifs(site: Site, reader: StoreReader, asked: Question) -> Page:
    """Return the list of the saved what-ifs."""
    del reader
    _only_everything(asked.viewer)
    try:
        files = site.whatifs.iterdir() if site.whatifs is not None else ()
        pages = [path for path in files if WHATIF.fullmatch(path.name) and path.is_file()]
        found = sorted(((local(path.stat().st_mtime), path.name) for path in pages), reverse=True)
    except OSError as error:
        raise PageRefusedError(503, f"{site.whatifs}: {error.strerror}") from None
    return Page("whatifs.html", {"folder": site.whatifs, "found": found})


def saved_page(site: Site, asked: Question) -> bytes:
    """Return a saved page as it is; raise PageRefusedError for any other file."""
    _only_everything(asked.viewer)
    path = site.whatifs / asked.name if site.whatifs is not None and WHATIF.fullmatch(asked.name) else None
    with suppress(OSError):  # it is gone, or not for this process
        if path is not None and not path.is_symlink() and path.is_file() and path.stat().st_size <= MAX_PAGE:
            return path.read_bytes()
    raise PageRefusedError(404, "no saved page of this name")


def local_second(at_s: float) -> str:
    """Return a moment as the local clock shows it, to the second."""
    return f"{local(at_s)}:{int(at_s % 60):02d}"


def job_cells(jobs: Sequence[JobRow]) -> Iterator[Mapping[str, str | int]]:
    """Yield the cells of each job, as on the screen of ``top``."""
    for one in jobs:
        yield {
            "id": one.id, "restart": one.restart, "user": one.user, "name": one.name,
            "state": one.lease or one.slurm_state.lower(),
            "gpus": gpu_names(one.gpus) if one.gpus else f"wants {one.gpus_wanted}",
            "iteration": milliseconds(one.iteration_s) if one.iteration_s is not None else "",
            "share": f"{one.share:.0%}" if one.share is not None else "", "action": one.last_action,
            "why": one.reason or (one.why_not_ready if one.lease else ""),
        }  # fmt: skip


def _current(last: Round) -> Iterator[LeaseRow]:
    """Yield the stretches that have not ended yet, on each host."""
    for one in last.snapshot.jobs:
        lease = one.lease
        if lease is not None and lease.state in HOLDING:
            for name in sorted({gpu.host for gpu in lease.gpus}):
                gpus = tuple(gpu.index for gpu in lease.gpus if gpu.host == name)
                yield LeaseRow(name, *one.key, gpus, last.at_s - lease.held_s, last.at_s)


def _place(row: LeaseRow) -> str:
    return gpu_names(Gpu(row.host, index) for index in row.gpus)


def _stretch_text(row: LeaseRow, name: str) -> str:
    return f"{name}, {local_second(row.from_s)} to {local_second(row.to_s)}, {about(row.to_s - row.from_s)}"


def _number(text: str) -> int:
    """Return a number of a request; raise PageRefusedError for other text."""
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII):
        raise PageRefusedError(404, "this is no number")
    return int(text)


def _only_everything(viewer: Viewer) -> None:
    if not viewer.everything:
        raise PageRefusedError(403, "saved what-ifs name users: they are for those who may read the service's store")
