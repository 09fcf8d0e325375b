"""What running jobs have shown of how their models depend on CPUs, and the profiles that follow from it (pure).

Observations of one user's jobs of one model, GPU type and number of GPUs add to one belief: other users' jobs cannot
change it. A job that departs from it by the test of ``profiler.online`` is in a new phase and has a belief of its own
from then on. A profile is corrected once a belief is sure and says something else than noise would.
"""

from __future__ import annotations

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
from cadenza.slurm_plugin.service.profiles.observations import Sight

VERSION = 1
SPREAD = 0.2
"""How far off a profile from a file may be, as a standard deviation in logarithms."""
SURE = 0.1
"""A belief counts at CPUs where half of its 95 % interval is at most this part."""
NOISE = 0.03
"""Less than this part is no difference."""
APART = 1.1
"""Numbers of CPUs that are at least so many times each other are different ones."""
FIRST, DOUBT = 3, 3.0
"""After so many observations a job whose Page-Hinkley sum is higher than this does not add to its model's belief."""
LIMITS = 0.98
"""Memory is a limit where the profile has less than this part of the speed of most memory."""


class Record(msgspec.Struct, frozen=True):
    """What is known under one name, as the store keeps it: of a model's jobs, or of one job in a phase of its own."""

    v: int = VERSION
    belief: Belief | None = None
    used: Law | None = None
    """The law that corrects the profile; None: the profile stands."""
    memory_gb: float = 0.0
    """Least memory for each GPU that was seen."""
    slower: float = 0.0
    faster: float = 0.0
    """A job's Page-Hinkley sums."""
    phase: int = 0
    phase_s: float = 0.0
    """When its last new phase was noticed, seconds since the epoch."""


NOTHING = Record()


class Subject(NamedTuple):
    """Whom an observation is about: the names of the two records, and the profile from a file, if there is one."""

    kind: str
    job: str
    profile: Profile | None


def subject(job: Job, profile: Profile | None, gpu_type: str) -> Subject:
    """Return under which names a job's observations count; ``profile``: that of its type of GPU."""
    model = job.options.model if job.options is not None else None
    if profile is not None:
        model, gpu_type = profile.model, profile.gpu
    name = f"{job.user}/{model}" if model else f"{job.user}/job {job.key.id}"
    return Subject(f"{name}@{gpu_type}x{job.gpus}", f"job {job.key.id}", profile)


def encoded(record: Record) -> str:
    """Return a record as JSON, less than 4 kB."""
    return msgspec.json.encode(record, order="deterministic").decode()


def decoded(rows: Mapping[str, str]) -> dict[str, Record]:
    """Return the records of :func:`encoded` by name; those of another version begin anew."""
    found = {}
    for name, text in rows.items():
        try:
            record = msgspec.json.decode(text, type=Record)
        except msgspec.DecodeError:
            continue
        if record.v == VERSION:
            found[name] = record
    return found


# --- Learning ------------------------------------------------------------------------------------------


def law_of(profile: Profile) -> Law:
    """Return the law that comes nearest to a profile with most memory."""
    if "law" not in profile.derived:
        profile.derived["law"] = fit(_times(profile))
    law: Law = profile.derived["law"]
    return law


def _times(profile: Profile) -> dict[float, float]:
    rows = zip(profile.cpus_per_gpu, profile.throughput, strict=True)
    return {cpus: profile.iteration_s / row[-1] for cpus, row in rows}


def learn(known: Mapping[str, Record], about: Subject, sight: Sight, now_s: float) -> dict[str, Record]:
    """Return the records that an observation changes.

    With a profile the observation is taken relative to it, so that its shape beyond the law counts as known. Where
    memory is what limits the job, nothing is learnt.
    """
    setting, base = sight.setting, None if about.profile is None else law_of(about.profile)
    seconds = sight.iteration_s
    if about.profile is not None and base is not None:
        if _limited(about.profile, setting.cpus, setting.memory_gb):
            return {}
        seconds *= base.time_s(setting.cpus) / predict(base, _times(about.profile), setting.cpus)
    shared, mine = known.get(about.kind, NOTHING), known.get(about.job, NOTHING)
    if shared.belief is None or not _from(shared.belief, base):
        first = guess(setting.cpus, seconds) if base is None else begin(base, SPREAD)
        shared, mine = Record(belief=first, memory_gb=setting.memory_gb), NOTHING
    shared = structs.replace(shared, memory_gb=min(shared.memory_gb, setting.memory_gb))
    shared, mine = _observed(shared, mine, (setting.cpus, seconds, sight.error), now_s)
    return {about.kind: _settled(shared, base), about.job: _settled(mine, base)}


def _observed(
    shared: Record, mine: Record, seen: tuple[float, float, float], now_s: float
) -> tuple[Record, Record]:
    """Return the model's record and the job's after an observation: CPUs, seconds and relative error."""
    belief = mine.belief or shared.belief
    if belief is None:
        return shared, mine
    after = observe(replace(belief, slower=mine.slower, faster=mine.faster, phase=mine.phase), *seen)
    if after.phase > mine.phase:
        return shared, Record(belief=after, phase=after.phase, phase_s=now_s)
    drift = structs.replace(mine, slower=after.slower, faster=after.faster)
    if mine.belief is None and belief.observations >= FIRST and max(after.slower, after.faster) > DOUBT:
        return shared, drift  # it may be in a phase of its own: the others' belief waits
    if mine.belief is not None:
        return shared, structs.replace(drift, belief=after)
    return structs.replace(shared, belief=replace(after, slower=0.0, faster=0.0, phase=0)), drift


def _from(belief: Belief, base: Law | None) -> bool:
    """Whether a belief began with this profile's law, or with a guess."""
    if base is None:
        return belief.spread > SPREAD
    return belief.spread <= SPREAD and max(abs(log(a / b)) for a, b in zip(belief.prior, base, strict=True)) < NOISE


def _limited(profile: Profile, cpus: float, memory_gb: float) -> bool:
    return profile.speed(cpus, memory_gb) < LIMITS * profile.speed(cpus, inf)


def _settled(record: Record, base: Law | None) -> Record:
    """Return a record with the law in use replaced where the belief is sure of another one."""
    belief = record.belief
    if belief is None:
        return record
    used, found = record.used or base, belief.law
    sure = [one.cpus for one in belief.seen if belief.unsure(one.cpus) <= SURE]
    if used is None:
        differs = len(sure) > 1 and max(sure) >= APART * min(sure)
    else:
        differs = any(abs(log(found.time_s(c) / used.time_s(c))) > max(belief.unsure(c), NOISE) for c in sure)
    return structs.replace(record, used=found) if differs else record


# --- Profiles ------------------------------------------------------------------------------------------


def corrected(profile: Profile, law: Law) -> Profile:
    """Return a profile whose CPU axis follows another law, in scale and shape; storage stays the limit where it was."""
    base, reference = law_of(profile), profile.reference
    iteration_s = profile.iteration_s * _factor(base, law, reference.cpus / reference.gpus)
    rows = []
    for cpus, row in zip(profile.cpus_per_gpu, profile.throughput, strict=True):
        times, factor = [profile.iteration_s / value for value in row], _factor(base, law, cpus)
        least = times[-1] * factor
        rows.append(
            tuple(iteration_s / (max(time, least) if time * LIMITS > times[-1] else time * factor) for time in times)
        )
    return replace(profile, iteration_s=iteration_s, throughput=tuple(rows), declared_best=None, siblings={})


def _factor(base: Law, law: Law, cpus: float) -> float:
    return law.time_s(cpus) / base.time_s(cpus)


def learned(record: Record, model: str, node: Node) -> Profile | None:
    """Return the profile of a job that has none, over the CPUs at which its belief is sure; None until it can be made.

    It must be sure of the proportional share, so that nobody is promised less than that; with fewer or more CPUs than
    it is sure of it says nothing, and with less memory than was seen it says less.
    """
    belief, law = record.belief, record.used
    if belief is None or law is None or not node.gpus or record.memory_gb <= 0:
        return None
    share = node.cpus / node.gpus
    wanted = {share, *(one.cpus for one in belief.seen), *map(float, range(1, node.cpus + 1))}
    grid = tuple(sorted(cpus for cpus in wanted if belief.unsure(cpus) <= SURE))
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
