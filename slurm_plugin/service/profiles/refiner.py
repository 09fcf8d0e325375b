"""Refines the jobs' profiles round by round: follows their windows, learns, and says which profile counts for a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.policies.core.profile import Profile, linked
from cadenza.profiler.model.roofline import Law
from cadenza.slurm_plugin.service.profiles.beliefs import (
    Record,
    Subject,
    corrected,
    decoded,
    encoded,
    learn,
    learned,
    subject,
)
from cadenza.slurm_plugin.service.profiles.library import Found
from cadenza.slurm_plugin.service.profiles.observations import Window, setting_of, watch

Laws = tuple[tuple[str, Law], ...]
"""By GPU type."""


class Refiner:
    """What is known of the jobs, and their windows. A profile is one object as long as it stays the same."""

    def __init__(self, rows: Mapping[str, str], *, learns: bool = True) -> None:
        """``rows``: what :meth:`changed` returned before; ``learns``: whether jobs without a profile may get one."""
        self.learns = learns
        self._known = decoded(rows)
        self._changed: set[str] = set()
        self._windows: dict[JobKey, Window] = {}
        self._about: dict[JobKey, Subject] = {}
        self._corrected: dict[tuple[int, Laws], tuple[Profile, Profile]] = {}
        """With the profile that was corrected, which must not be replaced by another of its identity."""
        self._learned: dict[str, tuple[Record, Profile | None]] = {}
        self._before = (self._corrected, self._learned)
        """The same of the last round; what is not asked for in a round is dropped."""

    def found(self, job: Job, first: Found, node: Node | None, *, file: bool = False) -> Found:
        """Return a job's profile, corrected or learnt, and the sentence on it.

        ``first``: what the files say; ``node``: where it runs, if it does; ``file``: a file is for it, right or wrong.
        """
        base = first.profile
        here = base.on(node.gpu_type) if base is not None and node is not None else base
        about = subject(job, here, node.gpu_type if node is not None else "")
        if node is not None:
            self._about[job.key] = about
        if base is not None:
            return Found(self._refined(job, base), _joined(first.note, self._note(job, about)))
        if node is None or file or not self.learns:
            return first
        profile = self._from_scratch(about, node)
        said = "profile learnt while it runs" if profile is not None else first.note
        return Found(profile, _joined(said, self._note(job, about)))

    def watch(self, snapshot: ClusterSnapshot) -> None:
        """Take in what a snapshot shows of the jobs whose profiles :meth:`found` was asked for."""
        windows = {}
        for key in sorted(self._about.keys() & snapshot.by_key.keys()):
            window, sight = watch(self._windows.get(key), snapshot.by_key[key], snapshot.time_s)
            if window is not None:
                windows[key] = window
            if sight is not None:
                news = learn(self._known, self._about[key], sight, snapshot.time_s)
                self._known |= news
                self._changed |= news.keys()
        self._windows, self._about = windows, {}
        self._before, self._corrected, self._learned = (self._corrected, self._learned), {}, {}

    def changed(self) -> dict[str, str]:
        """Return the records that have changed since the last call, for the store."""
        names, self._changed = self._changed, set()
        return {name: encoded(self._known[name]) for name in sorted(names)}

    def _refined(self, job: Job, base: Profile) -> Profile:
        """Return a profile with its siblings, those corrected of which something else is known."""
        members = base.siblings or {base.gpu: base}
        abouts = {gpu: subject(job, member, gpu) for gpu, member in members.items()}
        laws = tuple((gpu, law) for gpu, about in abouts.items() if (law := self._record(about).used) is not None)
        if not laws:
            return base
        name = (id(base), laws)
        known = self._corrected.get(name) or self._before[0].get(name)
        if known is None:
            found = {**members, **{gpu: corrected(members[gpu], law) for gpu, law in laws}}
            family = linked({gpu: replace(member, siblings={}) for gpu, member in found.items()})
            known = (base, family[base.gpu])
        self._corrected[name] = known
        return known[1]

    def _from_scratch(self, about: Subject, node: Node) -> Profile | None:
        record = self._record(about)
        name = f"{about.kind} {about.job} {node.cpus} {node.gpus} {node.memory_mb}"
        known = self._learned.get(name) or self._before[1].get(name)
        if known is None or known[0] is not record:
            made = learned(record, about.kind, node)
            known = (record, known[1] if known is not None and _alike(known[1], made) else made)
        self._learned[name] = known
        return known[1]

    def _record(self, about: Subject) -> Record:
        """Return what counts for a job: its own phase, else what is known of its model."""
        mine = self._known.get(about.job)
        if mine is not None and mine.belief is not None:
            return mine
        return self._known.get(about.kind, Record())

    def _note(self, job: Job, about: Subject) -> str:
        """Return what was learnt, for ``cadenza why``."""
        record, setting = self._record(about), setting_of(job)
        belief = record.belief
        if belief is None:
            return ""
        seen = ", ".join(f"{one.cpus:g}" for one in belief.seen)
        cpus = setting.cpus if setting is not None else belief.seen[-1].cpus
        how = "refined from" if record.used is not None else "not changed by"
        said = f"{how} {belief.observations} observations at {seen} CPUs a GPU, ± {belief.unsure(cpus):.0%}"
        if not record.phase:
            return said
        return f"{said}; new phase since {datetime.fromtimestamp(record.phase_s, UTC):%Y-%m-%d %H:%M} UTC"


def _alike(one: Profile | None, other: Profile | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.cpus_per_gpu, one.throughput, one.memory_gb_per_gpu, one.iteration_s) == (
        other.cpus_per_gpu,
        other.throughput,
        other.memory_gb_per_gpu,
        other.iteration_s,
    )


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
