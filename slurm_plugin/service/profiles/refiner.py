"""Refines the jobs' profiles round by round: follows their windows, learns, and corrects or makes profiles."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node
from cadenza.policies.core.profile import Profile, linked
from cadenza.profiler.model.roofline import Law
from cadenza.slurm_plugin.service.profiles.beliefs import (
    OF_A_JOB,
    Record,
    Subject,
    corrected,
    decoded,
    encoded,
    learn,
    learned,
    subject,
)
from cadenza.slurm_plugin.service.profiles.library import ProfileChoice
from cadenza.slurm_plugin.service.profiles.observations import Window, setting_of, watch

log = logging.getLogger(__name__)

Laws = tuple[tuple[str, Law], ...]
"""By GPU type."""
MAX_MODELS = 128
"""Records of one user's models that are kept, each some 60 kB: a model is any name that the user gives a job."""


class Refiner:
    """Records of beliefs and the jobs' windows. A profile is one object as long as it stays the same."""

    def __init__(self, rows: Mapping[str, str], *, learns: bool = True) -> None:
        """``rows``: earlier results of :meth:`changed`; ``learns``: True if jobs without a profile may get one."""
        self.learns = learns
        self._records = decoded(rows)
        self._changed: set[str] = set()
        self._windows: dict[JobKey, Window] = {}
        self._subjects: dict[JobKey, Subject] = {}
        self._corrected: dict[tuple[int, Laws], tuple[Profile, Profile]] = {}
        """With the profile that was corrected, which must not be replaced by another of its identity."""
        self._learned: dict[str, tuple[Record, Profile | None]] = {}
        self._before = (self._corrected, self._learned)
        """Both caches of the last round; an entry that is not used in a round is dropped."""

    def refine(self, job: Job, choice: ProfileChoice, node: Node | None, *, file: bool = False) -> ProfileChoice:
        """Return a job's profile, corrected or learned, and the sentence on it.

        ``choice``: the profile from the files; ``node``: its node, if it runs; ``file``: True if a file is for it,
        even one that may not be used.
        """
        base = choice.profile
        here = base.on(node.gpu_type) if base is not None and node is not None else base
        about = subject(job, here, node.gpu_type if node is not None else "")
        if node is not None:
            self._subjects[job.key] = about
        if base is not None:
            return ProfileChoice(self._refined(job, base), _joined(choice.note, self._note(job, about)))
        if node is None or file or not self.learns:
            return choice
        profile = self._from_scratch(about, node)
        note = "profile learned while it runs" if profile is not None else choice.note
        return ProfileChoice(profile, _joined(note, self._note(job, about)))

    def watch(self, snapshot: ClusterSnapshot) -> None:
        """Take in a snapshot of the jobs whose profiles were refined this round."""
        windows = {}
        for key in sorted(self._subjects.keys() & snapshot.by_key.keys()):
            try:
                window, observation = watch(self._windows.get(key), snapshot.by_key[key], snapshot.time_s)
                learned_records = (
                    learn(self._records, self._subjects[key], observation, snapshot.time_s) if observation else {}
                )
            except Exception:
                log.exception("JOBID=%s teaches nothing in this round", key)
                continue
            if window is not None:
                windows[key] = window
            for name in learned_records:
                self._records.pop(name, None)  # the latest come last
            self._records |= learned_records
            self._changed |= learned_records.keys()
        self._forget({str(key.id) for key in snapshot.by_key})
        self._windows, self._subjects = windows, {}
        self._before, self._corrected, self._learned = (self._corrected, self._learned), {}, {}

    def _forget(self, present: Collection[str]) -> None:
        """Drop the records of single jobs that Slurm has forgotten, and of each user's models all but the latest."""
        models: Counter[str] = Counter()
        for name in reversed(tuple(self._records)):
            if (job := OF_A_JOB.match(name)) is not None:
                useful = job[1] in present
            else:
                user = name.partition("/")[0]
                models[user] += 1
                useful = models[user] <= MAX_MODELS
            if not useful:
                del self._records[name]

    def changed(self) -> dict[str, str]:
        """Return the records that have changed since the last call, for the store."""
        names, self._changed = self._changed, set()
        return {name: encoded(self._records[name]) for name in sorted(names & self._records.keys())}

    def _refined(self, job: Job, base: Profile) -> Profile:
        """Return a profile with its siblings, each corrected if a belief differs from it."""
        members = base.siblings or {base.gpu: base}
        abouts = {gpu: subject(job, member, gpu) for gpu, member in members.items()}
        laws = tuple((gpu, law) for gpu, about in abouts.items() if (law := self._record(about).used) is not None)
        if not laws:
            return base
        name = (id(base), laws)
        cached = self._corrected.get(name) or self._before[0].get(name)
        if cached is None:
            members = {**members, **{gpu: corrected(members[gpu], law) for gpu, law in laws}}
            family = linked({gpu: replace(member, siblings={}) for gpu, member in members.items()})
            cached = (base, family[base.gpu])
        self._corrected[name] = cached
        return cached[1]

    def _from_scratch(self, about: Subject, node: Node) -> Profile | None:
        record = self._record(about)
        name = f"{about.kind} {about.job} {node.cpus} {node.gpus} {node.memory_mb}"
        cached = self._learned.get(name) or self._before[1].get(name)
        if cached is None or cached[0] is not record:
            made = learned(record, about.kind, node)
            cached = (record, cached[1] if cached is not None and _alike(cached[1], made) else made)
        self._learned[name] = cached
        return cached[1]

    def _record(self, about: Subject) -> Record:
        """Return the record that counts for a job: that of its own phase, else that of its model."""
        mine = self._records.get(about.job)
        if mine is not None and mine.belief is not None:
            return mine
        return self._records.get(about.kind, Record())

    def _note(self, job: Job, about: Subject) -> str:
        """Return a sentence on the belief, for ``cadenza why``."""
        record, setting = self._record(about), setting_of(job)
        belief = record.belief
        if belief is None:
            return ""
        counts = ", ".join(f"{one.cpus:g}" for one in belief.seen)
        cpus = setting.cpus if setting is not None else belief.seen[-1].cpus
        effect = "refined from" if record.used is not None else "not changed by"
        note = f"{effect} {belief.observations} observations at {counts} CPUs a GPU, ± {belief.unsure(cpus):.0%}"
        if not record.phase:
            return note
        return f"{note}; new phase since {datetime.fromtimestamp(record.phase_s, UTC):%Y-%m-%d %H:%M} UTC"


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
