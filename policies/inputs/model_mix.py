"""Models for jobs without one: the class furthest below its target share, its models in turn (Synergy §5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.csv_table import number, quoted

TASKS = ("image", "language", "speech")
"""Order of the classes in a split, as published: vision, language, speech. Others follow by name."""


@dataclass(frozen=True, slots=True)
class ModelMix:
    """Classes of models with their target shares of the jobs, in percent."""

    classes: tuple[tuple[str, ...], ...]
    percent: tuple[float, ...]

    def models(self) -> Iterator[str]:
        """Yield a model for each next job, without end.

        As the published generator does it: the class with the largest target less share so far, the first such
        one on a tie, and the first class of all for the first job; within a class each model in turn.
        """
        had = [0] * len(self.classes)
        lag = [0.0] * len(self.classes)
        while True:
            chosen = max(range(len(had)), key=lag.__getitem__)
            yield self.classes[chosen][had[chosen] % len(self.classes[chosen])]
            had[chosen] += 1
            total = sum(had)
            lag = [percent / 100 - count / total for percent, count in zip(self.percent, had, strict=True)]


def read_split(text: str, where: str) -> tuple[float, ...]:
    """Return the shares of ``20/70/10``, as they are written; raise InputError for what is not a list of shares."""
    shares = tuple(number(part.strip(), f"{where}: split {quoted(text)}", most=100) for part in text.split("/"))
    if not 99 <= sum(shares) <= 100:  # noqa: PLR2004 (33/33/33 is a published split)
        raise InputError(f"{where}: split {quoted(text)} adds up to {sum(shares):g}, not to 100 (99 for 33/33/33)")
    return shares


def model_mix(profiles: Mapping[str, Profile], split: Sequence[float], where: str) -> ModelMix:
    """Return the mix of the profiles' models by task; raise InputError if the split has another number of tasks."""
    tasks = classes_of(profiles.values())
    if len(tasks) != len(split):
        names = ", ".join(task or "(none)" for task in tasks)
        raise InputError(
            f"{where}: the split has {len(split)} shares, and the profiles have {len(tasks)} tasks: {names}"
        )
    return ModelMix(tuple(tasks.values()), tuple(split))


def classes_of(profiles: Iterable[Profile]) -> dict[str, tuple[str, ...]]:
    """Return the models of each task, in the order of the profiles; tasks in the order of a split."""
    tasks: dict[str, tuple[str, ...]] = {}
    for profile in profiles:
        tasks[profile.task] = (*tasks.get(profile.task, ()), profile.model)
    order = sorted(tasks, key=lambda task: (TASKS.index(task) if task in TASKS else len(TASKS), task))
    return {task: tasks[task] for task in order}
