"""The profiles of a directory, and the choice of a job's: by its ``model`` option, its command or its name."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Job
from cadenza.policies.core.profile import UNMATCHED, Match, Profile, linked
from cadenza.policies.inputs.csv_table import quoted, suggest
from cadenza.policies.inputs.interference import read_interference
from cadenza.policies.inputs.profiles import read_profiles

MAX_DIP = 0.05
"""Largest loss of speed with more CPUs or memory that counts as noise; beyond it the profile is wrong."""

PAIRS = "pairs.csv"
"""Pairs of models that pay together, as `cadenza profile pair` writes them."""
Stamp = tuple[int, int, int]


class ProfileChoice(NamedTuple):
    """A job's profile, or None, and a sentence on its source or on the reason for None."""

    profile: Profile | None
    note: str


class Entry(NamedTuple):
    """One model in one file; without ``profile`` it may not be used because of ``problem``."""

    source: str
    model: str
    match: Match
    profile: Profile | None
    problem: str | None = None


@dataclass(frozen=True)
class Library:
    """The content of a directory, in the order of its files' names."""

    entries: tuple[Entry, ...] = ()
    together: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Throughput of two models packed over that of turns, by the one and the other."""
    pairs_problem: str | None = None
    """The error in the file of pairs, if there is one."""
    _families: dict[frozenset[str], Mapping[str, Mapping[str, Profile]]] = field(default_factory=dict, repr=False)

    @property
    def problems(self) -> Iterator[str]:
        """Return a sentence for each profile that may not be used."""
        return filter(None, (*(entry.problem for entry in self.entries), self.pairs_problem))

    def choose(self, job: Job, here: Collection[str], types: frozenset[str]) -> ProfileChoice:
        """Return a job's profile.

        ``here``: GPU types of the nodes that it has or may get; ``types``: all types of the cluster. Any profile fits
        nodes that name no type. A profile for several types has the others as siblings.
        """
        if not self.entries:
            return ProfileChoice(None, "")
        chosen, match = self._entry(job)
        if chosen is None:
            return ProfileChoice(None, match)
        usable = [entry for entry in self.entries if entry.model == chosen.model and entry.profile is not None]
        if not usable:
            return ProfileChoice(None, f"has its proportional share, for its profile may not be used: {chosen.problem}")
        if types not in self._families:
            self._families[types] = _families(self.entries, types, self.together)
        family = self._families[types][chosen.model]
        wanted = [name for name in sorted(here) if name in family] or [""] * ("" in family)
        if not wanted and not any(here):
            wanted = sorted(family)[:1]
        if wanted:
            return ProfileChoice(family[wanted[0]], f"profile {usable[0].model} ({usable[0].source}), {match}")
        measured = ", ".join(sorted(entry.profile.gpu for entry in usable if entry.profile is not None))
        return ProfileChoice(
            None,
            f"has its proportional share: its profile {chosen.model} ({chosen.source}) is for {measured}, and its "
            f"nodes have {', '.join(sorted(here))}",
        )

    def has(self, job: Job) -> bool:
        """Return whether a file is for a job, even one that may not be used."""
        return self._entry(job)[0] is not None

    def _entry(self, job: Job) -> tuple[Entry | None, str]:
        """Return the first entry for a job, with the way in which it matched or the reason for None."""
        model = job.options.model if job.options is not None else None
        if model is not None:
            named = next((entry for entry in self.entries if entry.model == model), None)
            if named is not None:
                return named, "named by its model option"
            models = {entry.model for entry in self.entries}
            return None, f"has its proportional share: there is no profile of {quoted(model)}; {suggest(model, models)}"
        for entry in self.entries:
            if entry.match.command and _fits(entry.match, job):
                return entry, f"matched by its command ({entry.match.command})"
        for entry in self.entries:
            if entry.match != UNMATCHED and not entry.match.command and _fits(entry.match, job):
                return entry, f"matched by its name ({entry.match.name})"
        namesake = next((entry for entry in self.entries if entry.model == job.name), None)
        return namesake, "matched by its name" if namesake is not None else ""


def _fits(match: Match, job: Job) -> bool:
    return (not match.name or fnmatchcase(job.name, match.name)) and (
        not match.command or fnmatchcase(job.command, match.command)
    )


def _families(
    entries: Iterable[Entry], types: Collection[str], together: Mapping[str, Mapping[str, float]]
) -> Mapping[str, Mapping[str, Profile]]:
    """Return the usable profiles by model and by GPU type as Slurm calls it, each with its siblings."""
    families: dict[str, dict[str, Profile]] = {}
    for entry in entries:
        if entry.profile is not None:
            gpu, pairs = slurm_type(entry.profile.gpu, types), together.get(entry.model, {})
            profile = replace(entry.profile, gpu=gpu, siblings={}, together=pairs)
            families.setdefault(entry.model, {}).setdefault(profile.gpu, profile)
    return {model: linked(family) for model, family in families.items()}


def slurm_type(gpu: str, types: Iterable[str]) -> str:
    """Return Slurm's type of a GPU that a profile names, perhaps as NVML does; its own name where no type fits.

    >>> slurm_type("NVIDIA A100-SXM4-80GB", ["a100", "v100"]), slurm_type("H100", ["a100"])
    ('a100', 'H100')
    """
    words = _words(gpu)
    exact = next((name for name in sorted(types) if name.casefold() == gpu.casefold()), None)
    part = next((name for name in sorted(types) if name and _words(name) <= words), None)
    return exact if exact is not None else part if part is not None else gpu


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.casefold()))


# --- Reading -------------------------------------------------------------------------------------------


class ProfileDirectory:
    """A directory of profiles; files are read again when they change."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: dict[Path, tuple[Stamp, tuple[Entry, ...]]] = {}
        self.library = Library()

    def refresh(self) -> bool:
        """Read the files that have changed since the last call; return whether any has."""
        stamps = dict(self._stamps())
        if stamps == {path: stamp for path, (stamp, _) in self._files.items()}:
            return False
        old = self._files
        self._files = {
            path: old[path] if path in old and old[path][0] == stamp else (stamp, tuple(read(path)))
            for path, stamp in sorted(stamps.items())
        }
        entries = tuple(_without_duplicates(entry for _, entries in self._files.values() for entry in entries))
        self.library = Library(entries, *read_pairs([path for path in self._files if path.name == PAIRS]))
        return True

    def _stamps(self) -> Iterator[tuple[Path, Stamp]]:
        try:
            for path in (*self._folder.glob("*.json"), *self._folder.glob(PAIRS)) if self._folder is not None else ():
                about = path.stat()
                yield path, (about.st_mtime_ns, about.st_size, about.st_ino)
        except OSError:  # a file went away during the listing: the next round sees the others
            return


def read(path: Path) -> Iterator[Entry]:
    """Yield a file's profiles; for a file with an error its models, each with the error."""
    source = path.name
    if source == PAIRS:
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield Entry(source, path.stem, UNMATCHED, None, f"{source}: cannot be read: {error}")
        return
    try:
        profiles = read_profiles(text, source)
    except InputError as error:
        for model, match in _models_in(text) or [(path.stem, UNMATCHED)]:
            yield Entry(source, model, match, None, str(error))
        return
    for first in profiles.values():
        for profile in (first.siblings or {"": first}).values():
            problem = misfit_reason(profile, source)
            yield Entry(source, profile.model, profile.match, None if problem else profile, problem)


def read_pairs(paths: Iterable[Path]) -> tuple[Mapping[str, Mapping[str, float]], str | None]:
    """Return by model the throughput of pairs over turns, and the file's error, with which it is not used."""
    pairs: dict[str, dict[str, float]] = {}
    for path in paths:
        try:
            rows = read_interference(path.read_text(encoding="utf-8"), path.name)
        except InputError as error:
            return {}, str(error)
        except (OSError, UnicodeDecodeError) as error:
            return {}, f"{path.name}: cannot be read: {error}"
        for (model, other), speeds in rows.items():
            pairs.setdefault(model, {})[other] = sum(speeds)
    return pairs, None


def misfit_reason(profile: Profile, source: str) -> str | None:
    """Return the reason for which a readable profile is implausible; None if it is plausible."""
    grid = profile.cpus_per_gpu
    for row, (less, more) in enumerate(pairwise(profile.throughput)):
        if any(b < a * (1 - MAX_DIP) for a, b in zip(less, more, strict=True)):
            return f"{source}: {profile.model} is slower with {grid[row + 1]:g} CPUs a GPU than with {grid[row]:g}"
    sizes = profile.memory_gb_per_gpu
    for values in profile.throughput:
        for column, (a, b) in enumerate(pairwise(values)):
            if b < a * (1 - MAX_DIP):
                return f"{source}: {profile.model} is slower with {sizes[column + 1]:g} GB a GPU than {sizes[column]:g}"
    return None


def _without_duplicates(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries; a model that an earlier file has for the same GPU type is refused."""
    sources: dict[tuple[str, str], str] = {}
    for entry in entries:
        kind = (entry.model, entry.profile.gpu) if entry.profile is not None else None
        if kind is None or kind not in sources:
            yield entry
        else:
            problem = f"{entry.source}: model {quoted(entry.model)} is already in {sources[kind]}"
            yield entry._replace(profile=None, problem=problem)
        if kind is not None:
            sources.setdefault(kind, entry.source)


def _models_in(text: str) -> Sequence[tuple[str, Match]]:
    """Return the models and patterns of a file with an error, as far as they can be read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    rows = value.get("profiles", [value]) if isinstance(value, dict) else []
    models = []
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("model"), str):
            keys = row["match"] if isinstance(row.get("match"), dict) else {}
            texts = (word if isinstance(word := keys.get(key), str) else "" for key in Match._fields)
            models.append((row["model"], Match(*texts)))
    return models
