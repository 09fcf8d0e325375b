"""CPU scaling learned from running jobs, and the profiles corrected by it (pure).

Observations of one user's jobs of one model, GPU type and number of GPUs add to one belief: other users' jobs cannot
change it. A job that departs from it by the test of ``profiler.model.belief`` is in a new phase and has a belief of its
own from then on. A profile is corrected once a belief is precise and differs from it by more than noise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf, log
from typing import NamedTuple

import msgspec
from msgspec import structs

from cadenza.policies.core.model import Job, Node
from cadenza.policies.core.profile import MB_PER_GB, Profile, Reference
from cadenza.profiler.model.belief import Belief, begin, guess, observe
from cadenza.profiler.model.roofline import Law, fit, predict
from cadenza.slurm_plugin.service.profiles.observations import Observation

VERSION = 1
SPREAD = 0.2
"""Error of a profile from a file, as a standard deviation in logarithms."""
MAX_RELATIVE_ERROR = 0.1
"""A belief counts at CPUs where half of its 95 % interval is at most this part."""
MIN_DIFFERENCE = 0.03
"""Smaller relative differences are noise."""
MIN_CPU_RATIO = 1.1
"""Ratio of two numbers of CPUs from which on they count as different."""
MIN_OBSERVATIONS, MAX_DRIFT = 3, 3.0
"""After this many observations a job with a higher Page-Hinkley sum no longer adds to its model's belief."""
MEMORY_BOUND_SPEED = 0.98
"""Memory is a limit where the profile has less than this part of the speed with most memory."""


class Record(msgspec.Struct, frozen=True):
    """One row of the store: the belief about a model's jobs, or about one job in a phase of its own."""

    v: int = VERSION
    belief: Belief | None = None
    used: Law | None = None
    """The law that corrects the profile; None: the profile stands."""
    memory_gb: float = 0.0
    """Least memory for each GPU in any observation."""
    slower: float = 0.0
    faster: float = 0.0
    """A job's Page-Hinkley sums."""
    phase: int = 0
    phase_s: float = 0.0
    """Time at which its last new phase was noticed, seconds since the epoch."""


NOTHING = Record()


OF_A_JOB = re.compile(r"job (\d+)\b")
"""Begin of the names of records of one job alone, with its number; the others begin with their user and a slash."""


class Subject(NamedTuple):
    """The names of the two records to which an observation adds, and the profile from a file, if there is one."""

    kind: str
    job: str
    profile: Profile | None


def subject(job: Job, profile: Profile | None, gpu_type: str) -> Subject:
    """Return the names of a job's records; ``profile``: that of its type of GPU."""
    model = job.options.model if job.options is not None else None
    if profile is not None:
        model, gpu_type = profile.model, profile.gpu
    name = f"{job.user}/{model}" if model else f"job {job.key.id} of {job.user}"
    return Subject(f"{name}@{gpu_type}x{job.gpus}", f"job {job.key.id}", profile)


def encoded(record: Record) -> str:
    """Return a record as JSON, less than 4 kB."""
    return msgspec.json.encode(record, order="deterministic").decode()


def decoded(rows: Mapping[str, str]) -> dict[str, Record]:
    """Return the records of :func:`encoded` by name; those of another version begin anew."""
    records = {}
    for name, text in rows.items():
        try:
            record = msgspec.json.decode(text, type=Record)
        except msgspec.DecodeError:
            continue
        if record.v == VERSION:
            records[name] = record
    return records


# --- Learning ------------------------------------------------------------------------------------------


def law_of(profile: Profile) -> Law:
    """Return the law that fits a profile with most memory best."""
    if "law" not in profile.derived:
        profile.derived["law"] = fit(_times(profile))
    law: Law = profile.derived["law"]
    return law


def _times(profile: Profile) -> dict[float, float]:
    rows = zip(profile.cpus_per_gpu, profile.throughput, strict=True)
    return {cpus: profile.iteration_s / row[-1] for cpus, row in rows}


def learn(records: Mapping[str, Record], about: Subject, observation: Observation, now_s: float) -> dict[str, Record]:
    """Return the records that an observation changes.

    With a profile the observation is relative to it, so that its shape beyond the law counts as known. Nothing is
    learned where memory limits the job.
    """
    setting, base = observation.setting, None if about.profile is None else law_of(about.profile)
    seconds = observation.iteration_s
    if about.profile is not None and base is not None:
        profile = about.profile
        whole_speed = profile.speed(setting.cpus, inf)
        if profile.speed(setting.cpus, setting.memory_gb) < MEMORY_BOUND_SPEED * whole_speed:
            return {}
        seconds *= base.time_s(setting.cpus) / predict(base, _times(about.profile), setting.cpus)
    shared, mine = records.get(about.kind, NOTHING), records.get(about.job, NOTHING)
    if shared.belief is None or not _began_with(shared.belief, base):
        first = guess(setting.cpus, seconds) if base is None else begin(base, SPREAD)
        shared, mine = Record(belief=first, memory_gb=setting.memory_gb), NOTHING
    shared = structs.replace(shared, memory_gb=min(shared.memory_gb, setting.memory_gb))
    shared, mine = _observed(shared, mine, (setting.cpus, seconds, observation.error), now_s)
    return {about.kind: _settled(shared, base), about.job: _settled(mine, base)}


def _observed(
    shared: Record, mine: Record, observed: tuple[float, float, float], now_s: float
) -> tuple[Record, Record]:
    """Return the model's record and the job's after an observation: CPUs, seconds and relative error."""
    belief = mine.belief or shared.belief
    if belief is None:
        return shared, mine
    after = observe(replace(belief, slower=mine.slower, faster=mine.faster, phase=mine.phase), *observed)
    if after.phase > mine.phase:
        return shared, Record(belief=after, phase=after.phase, phase_s=now_s)
    drift = structs.replace(mine, slower=after.slower, faster=after.faster)
    if mine.belief is None and belief.observations >= MIN_OBSERVATIONS and max(after.slower, after.faster) > MAX_DRIFT:
        return shared, drift  # it may be in a phase of its own: the others' belief waits
    if mine.belief is not None:
        return shared, structs.replace(drift, belief=after)
    return structs.replace(shared, belief=replace(after, slower=0.0, faster=0.0, phase=0)), drift


def _began_with(belief: Belief, base: Law | None) -> bool:
    """Return whether a belief began with this profile's law or, without one, with a guess."""
    if base is None:
        return belief.spread > SPREAD
    difference = max(abs(log(a / b)) for a, b in zip(belief.prior, base, strict=True))
    return belief.spread <= SPREAD and difference < MIN_DIFFERENCE


def _settled(record: Record, base: Law | None) -> Record:
    """Return a record with its belief's law in use, if that differs from the present one by more than its error."""
    belief = record.belief
    if belief is None:
        return record
    used, law = record.used or base, belief.law
    precise = [one.cpus for one in belief.seen if belief.unsure(one.cpus) <= MAX_RELATIVE_ERROR]
    if used is None:
        differs = len(precise) > 1 and max(precise) >= MIN_CPU_RATIO * min(precise)
    else:
        differs = any(
            abs(log(law.time_s(cpus) / used.time_s(cpus))) > max(belief.unsure(cpus), MIN_DIFFERENCE)
            for cpus in precise
        )
    return structs.replace(record, used=law) if differs else record


# --- Profiles ------------------------------------------------------------------------------------------


def corrected(profile: Profile, law: Law) -> Profile:
    """Return a profile whose CPU axis follows another law, in scale and shape; memory stays the limit where it was."""
    base, reference = law_of(profile), profile.reference
    iteration_s = profile.iteration_s * _factor(base, law, reference.cpus / reference.gpus)
    rows = []
    for cpus, row in zip(profile.cpus_per_gpu, profile.throughput, strict=True):
        times, factor = [profile.iteration_s / value for value in row], _factor(base, law, cpus)
        least = times[-1] * factor
        changed = (max(time, least) if time * MEMORY_BOUND_SPEED > times[-1] else time * factor for time in times)
        rows.append(tuple(iteration_s / time for time in changed))
    return replace(profile, iteration_s=iteration_s, throughput=tuple(rows), declared_best=None, siblings={})


def _factor(base: Law, law: Law, cpus: float) -> float:
    return law.time_s(cpus) / base.time_s(cpus)


def learned(record: Record, model: str, node: Node) -> Profile | None:
    """Return a profile for a job without one, over the CPUs at which its belief is precise; None if there is none yet.

    The belief must be precise at the proportional share, so that no job is promised less than that. The profile ends
    at the outermost precise CPUs, and at the least memory of the observations.
    """
    belief, law = record.belief, record.used
    if belief is None or law is None or not node.gpus or record.memory_gb <= 0:
        return None
    share = node.cpus / node.gpus
    wanted = {share, *(one.cpus for one in belief.seen), *map(float, range(1, node.cpus + 1))}
    grid = tuple(sorted(cpus for cpus in wanted if belief.unsure(cpus) <= MAX_RELATIVE_ERROR))
    if share not in grid:
        return None
    seconds = law.time_s(share)
    return Profile(
        model=model,
        iteration_s=seconds,
        cpus_per_gpu=grid,
        memory_gb_per_gpu=(record.memory_gb,),
        throughput=tuple((seconds / law.time_s(cpus),) for cpus in grid),
        reference=Reference(node.gpus, node.cpus, node.memory_mb / MB_PER_GB),
        gpu=node.gpu_type,
    )
