"""The simulator's prediction for the four jobs of live_tuning.py, from their measured profiles: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from replay_cluster import Size

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.profile import Demand, Profile
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.profiles import read_profiles, write_profiles
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate

SHARES = "proportional"
SHARING = SharingSettings(enforce=True, place=True, share_between_users=True, floor=True)
"""As the service has it, whose books are a floor; the simulator places every job itself."""
ROUND_S = 1.0
"""As in live_tuning.toml; a round follows every change as well."""


@dataclass(frozen=True)
class Kind:
    """One workload: its profile, in CPUs as Slurm counts them."""

    profile: Profile

    @property
    def share_s(self) -> float:
        """Return the seconds of an iteration at the proportional share."""
        return self.profile.iteration_s

    @property
    def best_s(self) -> float:
        """Return the same at its best."""
        return self.profile.iteration_s / self.profile.best_speed


def kinds(texts: Sequence[str], factor: float) -> tuple[dict[str, Kind], str]:
    """Return the profiles by model, in Slurm's CPUs, and as one file; ``factor`` of these are one of the machine's."""
    measured = {name: one for text in texts for name, one in read_profiles(text, "profile").items()}
    counted = {name: _counted(profile, factor) for name, profile in measured.items()}
    note = f"CPUs as Slurm counts them: {factor:g} are one of the machine's"
    return {name: Kind(profile) for name, profile in counted.items()}, write_profiles(counted, note=note)


def _counted(profile: Profile, factor: float) -> Profile:
    best, reference = profile.declared_best, profile.reference
    return replace(
        profile,
        cpus_per_gpu=tuple(cpus * factor for cpus in profile.cpus_per_gpu),
        reference=reference._replace(cpus=reference.cpus * factor),
        declared_best=Demand(best.cpus * factor, best.memory_gb) if best else None,
        siblings={},
    )


def predicted(
    jobs: Mapping[str, str],
    by_model: Mapping[str, Kind],
    iterations: Mapping[str, int],
    startup_s: Mapping[str, float],
    allocate: str,
    size: Size,
) -> dict[str, float]:
    """Return each job's completion time in seconds, all submitted at once."""
    trace = [
        TraceJob(
            id=number,
            submit_s=0.0,
            gpus=1,
            work_s=iterations[model] * by_model[model].share_s,
            model=model,
            profile=by_model[model].profile,
            iterations=iterations[model],
            startup_s=startup_s[model],
        )
        for number, model in enumerate(jobs.values())
    ]
    nodes = read_cluster(f"{size.nodes}x{size.gpus}:{size.cpus}:{size.memory_mb // 1000}", 2)
    policy = build("fifo", allocate, "timeslice", PolicySettings(partitions=frozenset({PARTITION}), sharing=SHARING))
    result = simulate(trace, nodes, policy, Setup(round_s=ROUND_S, rounds_on_events=True, lanes=2))
    return {name: found.jct_s or float("nan") for name, found in zip(jobs, result.jobs, strict=True)}
